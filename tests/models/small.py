"""Small versions of every family, and the inputs they take."""

import torch

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import ImageInputs, Inputs, TableInputs, TextInputs

TEXT = TextInputs(vocab_size=90, seq_len=12)
IMAGES = ImageInputs(channels=3, size=32, classes=5)
_ROPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_GPT2 = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}

_QWEN3_MOE = {**_ROPE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    **_ROPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

# name: the model, its --model-args
TRANSFORMERS: dict[str, tuple[str, dict]] = {
    "llama": ("llama-tiny", {}),
    "llama tied, scaled rope": ("llama-3.2-1b", {**_ROPE, "head_dim": 8}),
    "qwen2": ("qwen2.5-7b", _ROPE),
    "qwen2 tied": ("qwen2.5-0.5b", _ROPE),
    "mixtral": ("mixtral-8x7b", _ROPE),
    "mixtral with a window": ("mixtral-8x7b", {**_ROPE, "sliding_window": 4}),
    "qwen3 moe": ("qwen3-30b-a3b", _QWEN3_MOE),
    "deepseek v2": ("deepseek-v2-lite", _DEEPSEEK),
    "deepseek v3": ("deepseek-v3", {**_DEEPSEEK, "q_lora_rank": 16, "n_group": 2, "topk_group": 1}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2 untied": ("gpt2", {**_GPT2, "tie_word_embeddings": False}),
    "bert": ("bert-base", {**_ENCODER, "vocab_size": 100}),
    "bert untied": ("bert-base", {**_ENCODER, "vocab_size": 100, "tie_word_embeddings": False}),
    "vit": ("vit-b-16-hf", _ENCODER),
}

_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION = {**_TOWER, "image_size": 16, "patch_size": 8}
_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_HALVES = {f"{half}_{key}": size for half in ("encoder", "decoder") for key, size in _HALF.items()}
_IDS = dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"), 0)
_PATCHES = {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48}
_MROPE = {
    **_ROPE,
    "hidden_size": 48,
    "head_dim": 12,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
}

# models that give their own loss, and Mamba: --model-args
NAMED: dict[str, dict] = {
    "t5-small": {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4}
    | {"num_layers": 2, "num_decoder_layers": 3},
    "bart-base": {"vocab_size": 64, "d_model": 32, **_HALVES, **_IDS},
    "whisper-tiny": {"vocab_size": 64, "d_model": 32, "max_source_positions": 20, **_HALVES, **_IDS},
    "clip-vit-base-patch32": {
        "projection_dim": 24,
        "text_config": {**_TOWER, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 1},
        "vision_config": _VISION,
    },
    "siglip-base-patch16-224": {
        "text_config": {**_TOWER, "vocab_size": 64, "max_position_embeddings": 16, "projection_size": 32},
        "vision_config": _VISION,
    },
    "llava-1.5-7b": {
        "image_token_index": 7,
        "text_config": {**_TOWER, "vocab_size": 64},
        "vision_config": _VISION,
    },
    **{
        name: {
            **{f"{kind}_token_id": 7 + n for n, kind in enumerate(("image", "video", "vision_start", "vision_end"))},
            "text_config": _MROPE,
            "vision_config": {"depth": 2, "num_heads": 4, **vision},
        }
        for name, vision in {
            "qwen2-vl-2b": {"embed_dim": 32, "hidden_size": 48},
            "qwen2.5-vl-3b": {**_PATCHES, "fullatt_block_indexes": [1]},
            "qwen3-vl-4b": {**_PATCHES, "deepstack_visual_indexes": [0]},
        }.items()
    },
    "mamba-130m": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "time_step_rank": 2},
}

CNNS = [
    "simplecnn",
    "simplecnn-112",
    "lenet",
    "lenet-scratch",
    "mlp",
    "resnet18-small",
    "resnet18",
    "resnet50",
    "vgg11_bn",
]
TABLE = TableInputs(features=6, classes=3)


def inputs_of(task: str) -> Inputs:
    return {"image": IMAGES, "table": TABLE}.get(task, TEXT)


def batch_of(inputs: Inputs, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    if isinstance(inputs, ImageInputs):
        return torch.randn(count, inputs.channels, inputs.size, inputs.size, generator=generator)
    if isinstance(inputs, TableInputs):
        return torch.randn(count, inputs.features, generator=generator)
    return torch.randint(0, inputs.vocab_size, (count, inputs.seq_len), generator=generator)


def count_parameters(source: ModelSource) -> int:
    """The parameters of a named model in its published shape."""
    with torch.device("meta"):
        return parameter_count(build(source, None, {}))
