"""Make images into rows of patches with a grid of positions.

These are the inputs of Qwen's vision-language models. The models read the grids' values to split attention and place
tokens. All samples have one image of the same size, so these values are known on the host. They are numpy arrays, which
also work with fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.inputs import NamedInput, NamedInputs

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig


def grid_arguments(
    model: nn.Module, inputs: NamedInputs, named: Mapping[str, Tensor]
) -> dict[str, Tensor | np.ndarray]:
    """Return the arguments for one square image at the beginning of each sample's text.

    `named`: the batch's tensors by name. The patches of all images become the rows of one matrix.
    """
    qwen = cast("Qwen2_5_VLForConditionalGeneration", model)
    vision, text = cast("Qwen2_5_VLVisionConfig", qwen.config.vision_config), qwen.model.language_model
    if hasattr(text, "_deepstack_process"):  # Qwen3-VL's function would read the text's mask
        vars(text)["_deepstack_process"] = _add_to_first_tokens
    image = next(tensor for tensor in inputs.tensors if tensor.name == "pixel_values")
    pixels = named["pixel_values"]
    count, side, device = len(pixels), math.isqrt(image.shape[0]), pixels.device
    # the merge size, the patch size and the number of learned positions (0 if there are none)
    sizes = (vision.spatial_merge_size, vision.patch_size, getattr(vision, "num_position_embeddings", 0))
    known = _host_values(sizes, side, count, getattr(vision, "window_size", None))
    arguments: dict[str, Tensor | np.ndarray] = {}
    arguments |= {f"image_{name}": torch.tensor(value.tolist(), device=device) for name, value in known.items()}
    # the boundaries of images and windows stay on the host, since the models read them
    arguments |= {f"image_{name}": known[name] for name in ("cu_seqlens", "cu_window_seqlens") if name in known}
    return {
        **arguments,
        "pixel_values": pixels.flatten(0, 1),
        "image_grid_thw": np.array([(1, side, side)] * count),
        "position_ids": _positions(inputs.tensors[0], side // vision.spatial_merge_size, count, device),
    }


# transformers computes these values from grids on the device and reads them back (.tolist()), which fake tensors do not
# allow. They depend only on the config and the image's size.
@cache
def _host_values(sizes: tuple[int, int, int], side: int, count: int, window: int | None) -> dict[str, np.ndarray]:
    """Return what transformers' vision_utils.py computes from the grids of equal images."""
    from transformers import vision_utils

    merge, patch, learned = sizes
    # Fake tensors have no values, but these results decide shapes. So the functions run on real tensors.
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
    """Return positions (3, count, tokens) in time, height and width: image, then text."""
    assert tokens.first is not None  # the image's tokens
    text_tokens = tokens.shape[0] - tokens.first[1]
    rows = torch.arange(side, device=device).repeat_interleave(side)
    columns = torch.arange(side, device=device).repeat(side)
    image = torch.stack([torch.zeros_like(rows), rows, columns])
    text = torch.arange(side, side + text_tokens, device=device).expand(3, -1)
    return torch.cat([image, text], dim=1).unsqueeze(1).repeat(1, count, 1)


def _add_to_first_tokens(hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Add an image's features to the first tokens of each text.

    The mask's values are not read. (transformers/models/qwen3_vl: _deepstack_process)
    """
    hidden_states, count = hidden_states.clone(), len(visual_pos_masks)
    hidden_states[_first_tokens(count, visual_embeds)] = (
        hidden_states[_first_tokens(count, visual_embeds)] + visual_embeds
    )
    return hidden_states


def _first_tokens(count: int, features: Tensor) -> tuple[Tensor, ...]:
    """Return sample and position of the features' tokens, which begin the samples."""
    each = len(features) // count
    samples = torch.arange(count, device=features.device).repeat_interleave(each)
    return torch.stack([samples, torch.arange(each, device=features.device).repeat(count)], dim=1).unbind(1)
