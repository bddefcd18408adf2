"""Models small enough to be trained in every layout; benchmarks/resume_matrix.py trains them too."""

from __future__ import annotations

LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LLAMA = {"model": "llama-tiny", "model_args": LLAMA_SIZES}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"model": "gpt2", "model_args": {"n_embd": 32, "n_layer": 2, "n_head": 2, **NO_DROPOUT}}  # with tied embeddings
