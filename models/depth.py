"""Read the numbers of layers from a transformers config, and change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.models.presets import ModelArgs

Path = tuple[str, ...]  # keys in a config

DEPTH = "num_hidden_layers"
# keys that refer to an image encoder's layers by number; names of an encoder's and a decoder's depth
_NUMBERED = ("vision_feature_layer", "fullatt_block_indexes", "deepstack_visual_indexes")
_BOTH = ("encoder_layers", "decoder_layers", "num_layers", "num_encoder_layers", "num_decoder_layers")


# Where a config has its numbers of layers, by the shape of the model:
#
#     {"num_hidden_layers": 32}                        ("num_hidden_layers",)
#     {"encoder_layers": 6, "decoder_layers": 6}       ("encoder_layers",), ("decoder_layers",)
#     {"text_config": {"num_hidden_layers": 32}, ...}  ("text_config", "num_hidden_layers"), ...
def depths(config: object) -> dict[Path, int]:
    """Return the layer counts in a config, by key.

    They are those of the model, of each inner model, or of encoder and decoder.

    If the config selects layers of the image encoder by index, the result leaves out this encoder's count. The encoder
    then keeps all its layers. With a shorter encoder, the model would use different layers (LLaVA, Qwen3-VL), or layers
    with another kind of attention (Qwen2.5-VL).
    """
    within = [name for name in ("text_config", "vision_config") if hasattr(config, name)]
    if any(hasattr(c, name) for c in (config, getattr(config, "vision_config", None)) for name in _NUMBERED):
        within = ["text_config"]
    if within:
        inner = {name: getattr(config, name) for name in within}
        # a config's class can have another name for the number of layers
        keys = {name: getattr(part, "attribute_map", {}).get(DEPTH, DEPTH) for name, part in inner.items()}
        counts = {(name, keys[name]): getattr(part, DEPTH, None) for name, part in inner.items()}
    elif getattr(config, "is_encoder_decoder", False):
        counts = {(name,): getattr(config, name, None) for name in _BOTH}
    else:
        counts = {(DEPTH,): getattr(config, DEPTH, None)}
    return {path: count for path, count in counts.items() if isinstance(count, int)}


def with_depths(args: ModelArgs, wanted: Mapping[Path, int]) -> ModelArgs:
    """Return model arguments with the `wanted` numbers of layers."""
    changed = dict(args)
    for path, count in wanted.items():
        *within, key = path
        for name in within:
            changed = {**changed, name: {**changed.get(name, {}), key: count}}
        if not within:
            changed[key] = count
    return changed


def of_all_layers(config: object, name: str) -> Any:
    """Return a config's value `name` if it is the same for all layers.

    Returns None if the config lacks it or if layers have different values (Gemma 4's heads, SegFormer's list of heads).
    """
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None
    if isinstance(value, list | tuple):
        return value[0] if len(set(value)) == 1 else None
    return value


def leading(config: object) -> int:
    """Return how many first layers differ from the later ones, such as DeepSeek's."""
    return of_all_layers(config, "first_k_dense_replace") or 0


def part(config: object, path: Path) -> Any:
    """Return the config, or inner config, that contains the last key of a path."""
    for name in path[:-1]:
        config = getattr(config, name)
    return config
