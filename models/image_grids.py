"""Make images into rows of patches with a grid of positions, the inputs of Qwen's vision-language models.

The models read the grids' values to split attention and place tokens. All samples have one image of the same size, so
these values are known on the host. They are numpy arrays, which also work with fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.inputs import NamedInput, NamedInputs


def grid_arguments(model: Any, inputs: NamedInputs, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments for one square image at the beginning of each sample's text.

    `named`: the batch's tensors by name. The patches of all images become the rows of one matrix.
    """
    config, text = model.config, model.model.language_model
    if hasattr(text, "_deepstack_process"):  # Qwen3-VL's function would read the text's mask
        text._deepstack_process = _add_to_places
    image = next(tensor for tensor in inputs.tensors if tensor.name == "pixel_values")
    pixels = named["pixel_values"]
    count, side, device = len(pixels), math.isqrt(image.shape[0]), pixels.device
    windows = getattr(config.vision_config, "window_size", None)
    known = _host_values(_facts(config.vision_config), side, count, windows)
    arguments = {f"image_{name}": torch.tensor(value.tolist(), device=device) for name, value in known.items()}
    arguments |= {f"image_{name}": known[name] for name in ("cu_seqlens", "cu_window_seqlens") if name in known}
    return {
        **arguments,
        "pixel_values": pixels.flatten(0, 1),
        "image_grid_thw": np.array([(1, side, side)] * count),
        "position_ids": _positions(inputs.tensors[0], side // config.vision_config.spatial_merge_size, count, device),
    }


def _facts(vision: Any) -> tuple[int, int, int]:
    """Return a vision config's merge size, patch size, and number of learned positions (0 if it has none)."""
    return vision.spatial_merge_size, vision.patch_size, getattr(vision, "num_position_embeddings", 0)


# transformers computes these values from grids on the device and reads them back (.tolist()), which fake tensors do not
# allow. They depend only on the config and the image's size.
@cache
def _host_values(facts: tuple[int, int, int], side: int, count: int, window: int | None) -> dict[str, np.ndarray]:
    """Return the values that transformers computes from the grids of `count` equal images (vision_utils.py)."""
    from transformers import vision_utils

    merge, patch, learned = facts
    with _disable_current_modes(), torch.device("cpu"):
        grids = torch.tensor([(1, side, side)] * count)
        values = {
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
            "position_ids": vision_utils.get_vision_position_ids(grids, merge),
        }
        if window is not None:
            names = ("window_index", "cu_window_seqlens")
            values |= zip(names, vision_utils.get_vision_window_index(grids, merge, window, patch), strict=True)
        if learned:
            interpolated = vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=math.isqrt(learned),
                mode="bilinear",
                align_corners=True,
                spatial_merge_size=merge,
            )
            values |= zip(("interp_indices", "interp_weights"), interpolated, strict=True)
        return {name: tensor.numpy() for name, tensor in values.items()}


def _positions(tokens: NamedInput, side: int, count: int, device: torch.device) -> Tensor:
    """Return positions (3, count, tokens) in time, height and width. The image comes first, then the text."""
    assert tokens.first is not None  # the image's tokens
    text_tokens = tokens.shape[0] - tokens.first[1]
    rows = torch.arange(side, device=device).repeat_interleave(side)
    columns = torch.arange(side, device=device).repeat(side)
    image = torch.stack([torch.zeros_like(rows), rows, columns])
    text = torch.arange(side, side + text_tokens, device=device).expand(3, -1)
    return torch.cat([image, text], dim=1).unsqueeze(1).repeat(1, count, 1)


def _add_to_places(hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Add an image's features to the first tokens of each text, without reading the mask's values.

    (transformers/models/qwen3_vl: _deepstack_process)
    """
    hidden_states, count = hidden_states.clone(), len(visual_pos_masks)
    hidden_states[_places(count, visual_embeds)] = hidden_states[_places(count, visual_embeds)] + visual_embeds
    return hidden_states


def _places(count: int, features: Tensor) -> tuple[Tensor, ...]:
    each = len(features) // count
    samples = torch.arange(count, device=features.device).repeat_interleave(each)
    return torch.stack([samples, torch.arange(each, device=features.device).repeat(count)], dim=1).unbind(1)
