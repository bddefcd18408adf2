"""Shapes of published transformers models, as the config.json in each model's repository gives them. No weights."""

from __future__ import annotations

from typing import Any


def _shape(width: int, layers: int, heads: int, mlp: int, kv_heads: int | None = None) -> dict[str, Any]:
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
        **_shape(width, layers, heads, mlp, kv_heads=8),
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
        **_shape(width, layers, heads, mlp, kv_heads),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        **more,
    }


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe BERT: Devlin et al., 2019, section 3; config.json of google-bert/bert-*-uncased."""
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 30522,
        **_shape(width, layers, heads, 4 * width),
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }


def _vit16(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe ViT: Dosovitskiy et al., 2021, table 1; config.json of google/vit-*-patch16-224."""
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        **_shape(width, layers, heads, 4 * width),
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "num_labels": 1000,
    }


_SMALL_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}

# ours: bytes on two CPU cores; 260 ids are the 256 bytes and 4 special tokens
_LLAMA_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    **_shape(160, 4, 4, 432, kv_heads=2),
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}

# Jiang et al., 2024, table 1; config.json of mistralai/Mixtral-8x7B-v0.1
_MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    **_shape(4096, 32, 32, 14336, kv_heads=8),
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-tiny": _LLAMA_TINY,
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, rope_factor=32.0, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28672),
    "llama-3.1-405b": _llama3(16384, 126, 128, 53248),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, max_position_embeddings=32768, **_SMALL_QWEN),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960, **_SMALL_QWEN),
    "qwen2.5-3b": _qwen25(2048, 36, 16, 2, 11008, max_position_embeddings=32768, **_SMALL_QWEN),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18944, rms_norm_eps=1e-6),
    "qwen2.5-14b": _qwen25(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _qwen25(8192, 80, 64, 8, 29568),
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "vit-b-16-hf": _vit16(768, 12, 12),
    "vit-l-16-hf": _vit16(1024, 24, 16),
}
