"""Shapes of published transformers models, as the config.json in each model's repository gives them. No weights."""

from __future__ import annotations

from typing import Any

from zerofit.models.named_input_presets import NAMED_INPUT_PRESETS


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


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool = False) -> dict[str, Any]:
    """Describe Qwen3's dense models: Qwen Team, 2025, table 1; config.json of Qwen/Qwen3-*."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        **_shape(width, layers, heads, mlp, kv_heads=8),
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
        **_shape(width, layers, heads, mlp, kv_heads or heads),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
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


def _dinov2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe DINOv2: Oquab et al., 2023, table 16; config.json of facebook/dinov2-*. The head is of a classifier."""
    return {
        "model_type": "dinov2",
        "architectures": ["Dinov2ForImageClassification"],
        **_shape(width, layers, heads, 4 * width),
        "mlp_ratio": 4,
        "image_size": 518,
        "patch_size": 14,
        "num_channels": 3,
        "num_labels": 1000,
    }


def _mamba(width: int, layers: int) -> dict[str, Any]:
    """Describe Mamba: Gu and Dao, 2023, table 12; config.json of state-spaces/mamba-*-hf."""
    return {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "vocab_size": 50280,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": width // 16,
        "residual_in_fp32": True,
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

# config.json of mistralai/Mistral-7B-v0.3; Jiang et al., 2023, table 1 (v0.1, whose vocabulary is 32000)
_MISTRAL_7B = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32768,
    **_shape(4096, 32, 32, 14336, kv_heads=8),
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# DeepSeek-AI, 2024, appendix B; config.json of deepseek-ai/DeepSeek-V2-Lite
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    **_shape(2048, 27, 16, 10944, kv_heads=16),
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}

# config.json of google/gemma-3-1b-pt; Gemma Team, 2025, table 1
_GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    **_shape(1152, 26, 4, 6912, kv_heads=1),
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
    **_shape(5120, 40, 40, 17920, kv_heads=10),
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

PRESETS: dict[str, dict[str, Any]] = {
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
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
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
    "dinov2-small": _dinov2(384, 12, 6),
    "dinov2-base": _dinov2(768, 12, 12),
    "dinov2-large": _dinov2(1024, 24, 16),
    "gemma-3-1b": _GEMMA_3_1B,
    "phi-4": _PHI_4,
    "mamba-130m": _mamba(768, 24),
    "mamba-370m": _mamba(1024, 48),
    "mamba-790m": _mamba(1536, 48),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    **NAMED_INPUT_PRESETS,
}
