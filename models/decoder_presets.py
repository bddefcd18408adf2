"""Shapes of published language models that generate, as the config.json in each model's repository gives them."""

from __future__ import annotations

from typing import Any


def block_sizes(width: int, layers: int, heads: int, mlp: int, kv_heads: int | None = None) -> dict[str, Any]:
    """Name the sizes of a model's blocks as most configs do."""
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }
    return shape | ({"num_key_value_heads": kv_heads} if kv_heads else {})


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe GPT-2: Radford et al., 2019, table 2; config.json of openai-community/gpt2*."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


def _llama3(width: int, layers: int, heads: int, mlp: int, rope_factor: float = 8.0, **more: Any) -> dict[str, Any]:
    """Describe Llama 3.x: Grattafiori et al., 2024, table 3; config.json of meta-llama/Llama-3.1-*, Llama-3.2-1B."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        **block_sizes(width, layers, heads, mlp, kv_heads=8),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        **more,
    }


def _qwen25(width: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    """Describe Qwen2.5 base models: Qwen Team, 2024, table 1; config.json of Qwen/Qwen2.5-*."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        **block_sizes(width, layers, heads, mlp, kv_heads),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        **more,
    }


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool = False) -> dict[str, Any]:
    """Describe Qwen3's dense models: Qwen Team, 2025, table 1; config.json of Qwen/Qwen3-*."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        **block_sizes(width, layers, heads, mlp, kv_heads=8),
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _llama2(width: int, layers: int, heads: int, mlp: int, kv_heads: int | None = None) -> dict[str, Any]:
    """Describe Llama 2: Touvron et al., 2023, table 1; config.json of meta-llama/Llama-2-*-hf."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        **block_sizes(width, layers, heads, mlp, kv_heads or heads),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe OPT: Zhang et al., 2022, table 1; config.json of facebook/opt-*."""
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


def _falcon(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Describe Falcon: Almazrouei et al., 2023, table 10; config.json of tiiuae/falcon-*."""
    return {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "vocab_size": 65024,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "bos_token_id": 11,
        "eos_token_id": 11,
        **more,
    }


def _smollm2(width: int, layers: int, heads: int, mlp: int, kv_heads: int) -> dict[str, Any]:
    """Describe SmolLM2: Ben Allal et al., 2025, section 5; config.json of HuggingFaceTB/SmolLM2-*."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        **block_sizes(width, layers, heads, mlp, kv_heads),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _olmo2(width: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
    """Describe OLMo 2: OLMo Team, 2025, table 3; config.json of allenai/OLMo-2-*."""
    return {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "vocab_size": 100352,
        **block_sizes(width, layers, heads, mlp, kv_heads=heads),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "pad_token_id": 100277,
        "eos_token_id": 100257,
    }


def _gemma2(width: int, layers: int, heads: int, mlp: int, kv_heads: int, of_head: int, scalar: int) -> dict[str, Any]:
    """Describe Gemma 2: Gemma Team, 2024, table 1; config.json of google/gemma-2-*."""
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": 256000,
        **block_sizes(width, layers, heads, mlp, kv_heads),
        "head_dim": of_head,
        "query_pre_attn_scalar": scalar,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def _phi3(width: int, layers: int, heads: int, mlp: int, kv_heads: int, window: int) -> dict[str, Any]:
    """Describe Phi-3 with 4k tokens: Abdin et al., 2024; config.json of microsoft/Phi-3-*-4k-instruct."""
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 32064,
        **block_sizes(width, layers, heads, mlp, kv_heads),
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    }


_SMALL_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}

# ours: bytes on two CPU cores; 260 ids are the 256 bytes and 4 special tokens
_LLAMA_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    **block_sizes(160, 4, 4, 432, kv_heads=2),
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}

# ours: bytes on two CPU cores; 260 ids are the 256 bytes and 4 special tokens
_LLAMA_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    **block_sizes(160, 4, 4, 432, kv_heads=2),
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}

# config.json of mistralai/Mistral-7B-v0.3; Jiang et al., 2023, table 1 (v0.1, whose vocabulary is 32000)
_MISTRAL_7B = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32768,
    **block_sizes(4096, 32, 32, 14336, kv_heads=8),
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# config.json of google/gemma-3-1b-pt; Gemma Team, 2025, table 1
_GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    **block_sizes(1152, 26, 4, 6912, kv_heads=1),
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

# config.json of microsoft/phi-4; Abdin et al., 2024, section 3
_PHI_4 = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 100352,
    **block_sizes(5120, 40, 40, 17920, kv_heads=10),
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "pad_token_id": 100257,
}

DECODER_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-tiny": _LLAMA_TINY,
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, rope_factor=32.0, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, rope_factor=32.0, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28672),
    "llama-3.1-405b": _llama3(16384, 126, 128, 53248),
    "llama-2-7b": _llama2(4096, 32, 32, 11008),
    "llama-2-13b": _llama2(5120, 40, 40, 13824),
    "llama-2-70b": _llama2(8192, 80, 64, 28672, kv_heads=8),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "mistral-7b": _MISTRAL_7B,
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, max_position_embeddings=32768, **_SMALL_QWEN),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960, **_SMALL_QWEN),
    "qwen2.5-3b": _qwen25(2048, 36, 16, 2, 11008, max_position_embeddings=32768, **_SMALL_QWEN),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18944, rms_norm_eps=1e-6),
    "qwen2.5-14b": _qwen25(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _qwen25(8192, 80, 64, 8, 29568),
    "gemma-3-1b": _GEMMA_3_1B,
    "phi-4": _PHI_4,
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "falcon-7b": _falcon(4544, 32, 71, multi_query=True),
    "falcon-40b": _falcon(8192, 60, 128, num_kv_heads=8, new_decoder_architecture=True),
    "smollm2-135m": _smollm2(576, 30, 9, 1536, 3),
    "smollm2-360m": _smollm2(960, 32, 15, 2560, 5),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 8192, 32),
    "olmo-2-1b": _olmo2(2048, 16, 16, 8192),
    "olmo-2-7b": _olmo2(4096, 32, 32, 11008),
    "olmo-2-13b": _olmo2(5120, 40, 40, 13824),
    "gemma-2-2b": _gemma2(2304, 26, 8, 9216, 4, 256, 256),
    "gemma-2-9b": _gemma2(3584, 42, 16, 14336, 8, 256, 256),
    "gemma-2-27b": _gemma2(4608, 46, 32, 36864, 16, 128, 144),
    "phi-3-mini": _phi3(3072, 32, 32, 8192, 32, 2047),
    "phi-3-medium": _phi3(5120, 40, 40, 17920, 10, 2047),
}
