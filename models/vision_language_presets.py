"""Shapes of published Qwen models of images and text, as the config.json in each model's repository gives them."""

from __future__ import annotations

from typing import Any

from zerofit.models.decoder_presets import block_sizes


def _qwen_vl(kind: str, head: str, text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Put both halves together; the ids of an image's places are the same in all of them."""
    return {
        "model_type": kind,
        "architectures": [head],
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": tied,
        "text_config": {"model_type": f"{kind}_text", **text},
        "vision_config": {"model_type": f"{kind}_vision", **vision},
    }


def _qwen2_text(
    width: int, layers: int, heads: int, mlp: int, kv_heads: int, vocabulary: int, tokens: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        **block_sizes(width, layers, heads, mlp, kv_heads=kv_heads),
        "max_position_embeddings": tokens,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    }


def _qwen2_vl(width: int, layers: int, heads: int, mlp: int, kv_heads: int, vocabulary: int = 152064) -> dict[str, Any]:
    """Describe Qwen2-VL: Wang et al., 2024; config.json of Qwen/Qwen2-VL-*-Instruct."""
    text = _qwen2_text(width, layers, heads, mlp, kv_heads, vocabulary, tokens=32768)
    vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": width, "patch_size": 14}
    return _qwen_vl("qwen2_vl", "Qwen2VLForConditionalGeneration", text, vision, tied=width == 1536)


def _qwen25_vl(
    width: int, layers: int, heads: int, mlp: int, kv_heads: int, vocabulary: int = 152064, vision_mlp: int = 3420
) -> dict[str, Any]:
    """Describe Qwen2.5-VL: Bai et al., 2025, table 1; config.json of Qwen/Qwen2.5-VL-*-Instruct."""
    text = _qwen2_text(width, layers, heads, mlp, kv_heads, vocabulary, tokens=128000)
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": vision_mlp,
        "out_hidden_size": width,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    return _qwen_vl("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", text, vision, tied=width == 2048)


def _qwen3_vl(
    width: int, layers: int, heads: int, mlp: int, tied: bool, vision: dict[str, Any], taken: list[int]
) -> dict[str, Any]:
    """Describe Qwen3-VL: Bai et al., 2025; config.json of Qwen/Qwen3-VL-*-Instruct."""
    text = {
        "vocab_size": 151936,
        **block_sizes(width, layers, heads, mlp, kv_heads=8),
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {**vision, "out_hidden_size": width, "patch_size": 16, "deepstack_visual_indexes": taken}
    return _qwen_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", text, vision, tied)


_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}

VISION_LANGUAGE_PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-vl-2b": _qwen2_vl(1536, 28, 12, 8960, kv_heads=2, vocabulary=151936),
    "qwen2-vl-7b": _qwen2_vl(3584, 28, 28, 18944, kv_heads=4),
    "qwen2-vl-72b": _qwen2_vl(8192, 80, 64, 29568, kv_heads=8),
    "qwen2.5-vl-3b": _qwen25_vl(2048, 36, 16, 11008, kv_heads=2, vocabulary=151936),
    "qwen2.5-vl-7b": _qwen25_vl(3584, 28, 28, 18944, kv_heads=4),
    "qwen2.5-vl-32b": _qwen25_vl(5120, 64, 40, 27648, kv_heads=8, vision_mlp=3456),
    "qwen2.5-vl-72b": _qwen25_vl(8192, 80, 64, 29568, kv_heads=8, vision_mlp=3456),
    "qwen3-vl-2b": _qwen3_vl(2048, 28, 16, 6144, True, _SMALL_TOWER, [5, 11, 17]),
    "qwen3-vl-4b": _qwen3_vl(2560, 36, 32, 9728, True, _SMALL_TOWER, [5, 11, 17]),
    "qwen3-vl-8b": _qwen3_vl(4096, 36, 32, 12288, False, _TOWER, [8, 16, 24]),
    "qwen3-vl-32b": _qwen3_vl(5120, 64, 64, 25600, False, _TOWER, [8, 16, 24]),
}
