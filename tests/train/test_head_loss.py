"""A head that gives the loss: of which models, and that it gives what their logits give."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.spec.model_facts import IGNORE_INDEX, PLAIN_HEAD_TYPES
from zerofit.train.loss import counts, head_loss

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"vocab_size": 64, "num_key_value_heads": 2}
MORE = {
    "deepseek_v2": {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 16, "first_k_dense_replace": 1},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16},
}


def model_of(model_type: str, tmp_path, **more) -> torch.nn.Module:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **SHAPE, **MORE.get(model_type, {}), **more}))
    torch.manual_seed(0)
    return build(find(str(path)), TextInputs(vocab_size=64, seq_len=12), {}).train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(64, (2, 12))
    labels = x.roll(-1, dims=1)
    labels[:, -3:] = IGNORE_INDEX
    return x, labels


@pytest.mark.parametrize("model_type", PLAIN_HEAD_TYPES)
def test_what_the_head_gives_is_what_the_model_gives(model_type, tmp_path):
    model = model_of(model_type, tmp_path)
    made: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *given: made.append(given[-1]))
    x, labels = batch()
    logits = model(input_ids=x, use_cache=False).logits
    handle.remove()
    assert logits is made[0]
    head = head_loss(model, 5, inside=True)
    assert head is not None
    with head.with_labels(labels):
        loss = model(input_ids=x, use_cache=False).logits
        with torch.no_grad():
            counted = model(input_ids=x, use_cache=False).logits
    if model_type == "gpt2":  # whose dropout draws anew
        assert loss.shape == () and counted[1] == (labels != IGNORE_INDEX).sum()
        return
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(counted, counts(logits, labels), rtol=1e-6, atol=0)
    torch.testing.assert_close(model(input_ids=x, use_cache=False).logits, logits)


def test_other_heads_keep_their_logits(tmp_path):
    assert head_loss(model_of("llama", tmp_path), None, inside=True) is None
    scaled = model_of("gemma3_text", tmp_path, head_dim=16, final_logit_softcapping=30.0)
    assert head_loss(scaled, 5, inside=True) is None
    assert head_loss(torch.nn.Linear(2, 2), 5, inside=True) is None
