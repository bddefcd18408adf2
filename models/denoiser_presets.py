"""Shapes of published denoisers of diffusers, as the config.json in each model's repository gives them."""

from __future__ import annotations

from typing import Any

_FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
}


def _unet(side: int, context: int, **more: Any) -> dict[str, Any]:
    """Describe a UNet of latents: Rombach et al., 2022, appendix E."""
    sizes = {"in_channels": 4, "out_channels": 4, "layers_per_block": 2, "norm_num_groups": 32}
    return {
        "_class_name": "UNet2DConditionModel",
        "sample_size": side,
        "cross_attention_dim": context,
        **sizes,
        **more,
    }


def _sd3(layers: int, heads: int, positions: int, **more: Any) -> dict[str, Any]:
    """Describe Stable Diffusion 3: Esser et al., 2024, section 4; config.json of stabilityai/stable-diffusion-3*."""
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * heads,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": positions,
        **more,
    }


def _dit(side: int) -> dict[str, Any]:
    """Describe DiT-XL/2: Peebles and Xie, 2023, table 1; config.json of facebook/DiT-XL-2-*."""
    return {
        "_class_name": "DiTTransformer2DModel",
        "sample_size": side,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "num_embeds_ada_norm": 1000,
    }


# Podell et al., 2023, table 1
_SDXL = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

DENOISER_PRESETS: dict[str, dict[str, Any]] = {
    "stable-diffusion-1.5": _unet(64, 768, attention_head_dim=8),
    "stable-diffusion-2.1": _unet(96, 1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True),
    "sdxl": _unet(128, 2048, **_SDXL),
    "dit-xl-2": _dit(32),
    "dit-xl-2-512": _dit(64),
    "stable-diffusion-3-medium": _sd3(24, 24, 192),
    "stable-diffusion-3.5-medium": _sd3(24, 24, 384, dual_attention_layers=list(range(13)), qk_norm="rms_norm"),
    "stable-diffusion-3.5-large": _sd3(38, 38, 192, qk_norm="rms_norm"),
    "flux.1-dev": {**_FLUX, "guidance_embeds": True},
    "flux.1-schnell": {**_FLUX, "guidance_embeds": False},
}
