"""Shapes of published models that give their own loss, as the config.json in each model's repository gives them."""

from __future__ import annotations

from typing import Any


def _t5(width: int, layers: int, heads: int, mlp: int, of_head: int = 64) -> dict[str, Any]:
    """Describe T5: Raffel et al., 2020, section 3.7; config.json of google-t5/t5-*."""
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 32128,
        "d_model": width,
        "d_ff": mlp,
        "d_kv": of_head,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _flan_t5(width: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
    """Describe Flan-T5, of T5 1.1's shape: Chung et al., 2022; config.json of google/flan-t5-*."""
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {**_t5(width, layers, heads, mlp), **gated}


def _encoder_decoder(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Name the sizes of BART's and Whisper's two halves, which are alike."""
    halves = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    return {f"{half}_{key}": value for half in ("encoder", "decoder") for key, value in halves.items()}


def _bart(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Describe BART: Lewis et al., 2020, sections 2.1 and 5; config.json of facebook/bart-*."""
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": 50265,
        "d_model": width,
        **_encoder_decoder(width, layers, heads),
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


def _whisper(width: int, layers: int, heads: int, vocabulary: int = 51865, mel_bins: int = 80) -> dict[str, Any]:
    """Describe Whisper: Radford et al., 2022, table 1; config.json of openai/whisper-*."""
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": vocabulary,
        "num_mel_bins": mel_bins,
        "d_model": width,
        **_encoder_decoder(width, layers, heads),
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "bos_token_id": 50257,
        "pad_token_id": 50257,
        "eos_token_id": 50257,
        "decoder_start_token_id": 50258,
    }


def _tower(width: int, layers: int, heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": mlp, **more}


def _clip(text: int, vision: dict[str, Any]) -> dict[str, Any]:
    """Describe CLIP with a text encoder that wide: Radford et al., 2021, table 20; config.json of openai/clip-vit-*."""
    words = {"vocab_size": 49408, "max_position_embeddings": 77, "projection_dim": text}
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": text,
        "text_config": {**_tower(text, 12, text // 64, 4 * text), **words},
        "vision_config": {**vision, "projection_dim": text},
    }


def _siglip(tower: dict[str, Any], image: int, patch: int) -> dict[str, Any]:
    """Describe SigLIP: Zhai et al., 2023; config.json of google/siglip-*."""
    return {
        "model_type": "siglip",
        "architectures": ["SiglipModel"],
        "text_config": {**tower, "vocab_size": 32000, "max_position_embeddings": 64},
        "vision_config": {**tower, "image_size": image, "patch_size": patch},
    }


def _llava(width: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
    """Describe LLaVA 1.5: Liu et al., 2023: CLIP's largest encoder of images, a Llama 2; config.json of llava-hf/*."""
    words = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**_tower(width, layers, heads, mlp), **words},
        "vision_config": {
            "model_type": "clip_vision_model",
            **_tower(1024, 24, 16, 4096, image_size=336, patch_size=14, projection_dim=768),
        },
    }


NAMED_INPUT_PRESETS: dict[str, dict[str, Any]] = {
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "t5-3b": _t5(1024, 24, 32, 16384, of_head=128),
    "t5-11b": _t5(1024, 24, 128, 65536, of_head=128),
    "flan-t5-small": _flan_t5(512, 8, 6, 1024),
    "flan-t5-base": _flan_t5(768, 12, 12, 2048),
    "flan-t5-large": _flan_t5(1024, 24, 16, 2816),
    "flan-t5-xl": _flan_t5(2048, 24, 32, 5120),
    "flan-t5-xxl": _flan_t5(4096, 24, 64, 10240),
    "bart-base": _bart(768, 6, 12),
    "bart-large": _bart(1024, 12, 16),
    "whisper-tiny": _whisper(384, 4, 6),
    "whisper-base": _whisper(512, 6, 8),
    "whisper-small": _whisper(768, 12, 12),
    "whisper-medium": _whisper(1024, 24, 16),
    "whisper-large-v2": _whisper(1280, 32, 20),
    "whisper-large-v3": _whisper(1280, 32, 20, vocabulary=51866, mel_bins=128),
    "clip-vit-base-patch32": _clip(512, _tower(768, 12, 12, 3072, image_size=224, patch_size=32)),
    "clip-vit-base-patch16": _clip(512, _tower(768, 12, 12, 3072, image_size=224, patch_size=16)),
    "clip-vit-large-patch14": _clip(768, _tower(1024, 24, 16, 4096, image_size=224, patch_size=14)),
    "siglip-base-patch16-224": _siglip(_tower(768, 12, 12, 3072), 224, 16),
    "siglip-so400m-patch14-384": _siglip(_tower(1152, 27, 16, 4304), 384, 14),
    "llava-1.5-7b": _llava(4096, 32, 32, 11008),
    "llava-1.5-13b": _llava(5120, 40, 40, 13824),
}
