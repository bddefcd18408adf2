"""Shapes of published transformers models, as the config.json in each model's repository gives them. No weights."""

from __future__ import annotations

from typing import Any

from zerofit.models.decoder_presets import DECODER_PRESETS, block_sizes
from zerofit.models.mixture_presets import MIXTURE_PRESETS
from zerofit.models.named_input_presets import NAMED_INPUT_PRESETS
from zerofit.models.vision_language_presets import VISION_LANGUAGE_PRESETS


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe BERT: Devlin et al., 2019, section 3; config.json of google-bert/bert-*-uncased."""
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 30522,
        **block_sizes(width, layers, heads, 4 * width),
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }


def _vit16(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe ViT: Dosovitskiy et al., 2021, table 1; config.json of google/vit-*-patch16-224."""
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        **block_sizes(width, layers, heads, 4 * width),
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
        **block_sizes(width, layers, heads, 4 * width),
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


PRESETS: dict[str, dict[str, Any]] = {
    **DECODER_PRESETS,
    **MIXTURE_PRESETS,
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "vit-b-16-hf": _vit16(768, 12, 12),
    "vit-l-16-hf": _vit16(1024, 24, 16),
    "dinov2-small": _dinov2(384, 12, 6),
    "dinov2-base": _dinov2(768, 12, 12),
    "dinov2-large": _dinov2(1024, 24, 16),
    "mamba-130m": _mamba(768, 24),
    "mamba-370m": _mamba(1024, 48),
    "mamba-790m": _mamba(1536, 48),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    **NAMED_INPUT_PRESETS,
    **VISION_LANGUAGE_PRESETS,
}
