"""Shapes of published mixtures of experts, as the config.json in each model's repository gives them."""

from __future__ import annotations

from typing import Any

from zerofit.models.decoder_presets import block_sizes


def _mixtral(width: int, layers: int, heads: int, mlp: int, vocabulary: int, tokens: int) -> dict[str, Any]:
    """Describe Mixtral: Jiang et al., 2024, table 1; config.json of mistralai/Mixtral-*."""
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": vocabulary,
        **block_sizes(width, layers, heads, mlp, kv_heads=8),
        "max_position_embeddings": tokens,
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


def _qwen3_moe(width: int, layers: int, heads: int, mlp: int, of_expert: int) -> dict[str, Any]:
    """Describe Qwen3's mixtures of 128 experts: Qwen Team, 2025, table 2; config.json of Qwen/Qwen3-*-A*B."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        **block_sizes(width, layers, heads, mlp, kv_heads=4),
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": of_expert,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Describe gpt-oss: OpenAI, 2025, table 1; config.json of openai/gpt-oss-*. Its weights in bf16, not in MXFP4."""
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        **block_sizes(2880, layers, 64, 2880, kv_heads=8),
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    }


# ours: as llama-tiny, with four experts in place of each MLP, of which two see a token
_MIXTRAL_TINY = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 260,
    **block_sizes(160, 4, 4, 216, kv_heads=2),
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}

# DeepSeek-AI, 2024, appendix B; config.json of deepseek-ai/DeepSeek-V2-Lite
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    **block_sizes(2048, 27, 16, 10944, kv_heads=16),
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

# DeepSeek-AI, 2024, section 4.2; config.json of deepseek-ai/DeepSeek-V3, without the layer that predicts a token more
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    **block_sizes(7168, 61, 128, 18432, kv_heads=128),
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _llama4(experts: int, every: int, chunks: bool) -> dict[str, Any]:
    """Describe the text model of Llama 4: config.json of meta-llama/Llama-4-*, "text_config". Images are left out."""
    return {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "vocab_size": 202048,
        **block_sizes(5120, 48, 40, 8192, kv_heads=8),
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": every,
        "use_qk_norm": chunks,
        "max_position_embeddings": 10485760 if chunks else 1048576,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "pad_token_id": 200018,
    }


MIXTURE_PRESETS: dict[str, dict[str, Any]] = {
    "mixtral-tiny": _MIXTRAL_TINY,
    "mixtral-8x7b": _mixtral(4096, 32, 32, 14336, vocabulary=32000, tokens=32768),
    "mixtral-8x22b": _mixtral(6144, 56, 48, 16384, vocabulary=32000, tokens=65536),
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v3": _DEEPSEEK_V3,
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 6144, of_expert=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 12288, of_expert=1536),
    "llama-4-scout": _llama4(16, 1, True),
    "llama-4-maverick": _llama4(128, 2, False),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
