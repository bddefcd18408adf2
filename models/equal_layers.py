"""Find equal layers in a transformers model. Only a few of them need to be traced.

The config's number of layers is not enough, so the built model is inspected. Swin's config counts stages, which all
differ. The config of a hybrid counts layers of several kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import ModelError, ModelSource, source_config
from zerofit.models.depth import Path, depths, leading, part, with_depths
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import Inputs
from zerofit.models.partial import differ_by_layer
from zerofit.models.presets import ModelArgs
from zerofit.models.quantized import without_bits
from zerofit.models.sections import block_lists

ENOUGH = 2  # equal layers to trace: the first may create tensors for all layers, the second represents all later ones


def equal_layers(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> dict[Path, int]:
    """Return the config's keys that count equal layers, with their values.

    Equal layers have the same modules, shapes and settings. The leading layers, and the first layer after them, may
    differ from the others. If the number of layers also changes other parameters, or all layers must be traced for
    another reason, return {}. Raises ModelError if the model cannot be built.
    """
    if source.family != "transformers":
        return {}
    content = json.dumps([source_config(source), args])  # in the cache's key, since the file may change
    return dict(_equal_layers(replace(without_bits(source), pretrained=None), inputs, content))


def few_layers(config: object, path: Path) -> int:
    """Return the number of layers to trace for a key of the config."""
    return leading(part(config, path)) + ENOUGH


# Steps:
#
# 1. Candidates: keys of the config that count more layers than are traced, and whose layers have one kind.
# 2. Build the full model on meta. Drop candidates whose layers differ in modules, shapes or settings.
# 3. Build the model with few layers. Its parameters must be fewer by exactly the layers that were left out. Otherwise
#    the number of layers changes something else, too.
@lru_cache(maxsize=8)
def _equal_layers(source: ModelSource, inputs: Inputs | None, content: str) -> dict[Path, int]:
    args = json.loads(content)[1]
    config = make_config(source, inputs, args)
    few = {
        path: few_layers(config, path)
        for path, count in depths(config).items()
        if count > few_layers(config, path)
        and not differ_by_layer(source.partial, count)
        and len({str(kind) for kind in getattr(part(config, path), "layer_types", None) or ()}) <= 1
    }
    if not few:
        return {}
    with torch.device("meta"):
        full = build(source, inputs, args)
    run_inputs = inputs if any(len(path) > 1 for path in few) else None  # a run finds the parts that are used
    # the last traced layer represents itself and all later ones
    lists = [(path, list(blocks)[few[path] - 1 :]) for blocks, path in block_lists(full, run_inputs) if path in few]
    mixed = {path for path, blocks in lists if not _all_equal(blocks)}
    lists = [(path, blocks) for path, blocks in lists if path not in mixed]
    equal = {path: count for path, count in depths(config).items() if path in dict(lists)}
    try:
        with torch.device("meta"):
            small = build(source, inputs, with_depths(args, {path: few[path] for path in equal}))
    except ModelError:  # other values of the config depend on its number of layers
        return {}
    left_out = sum((len(blocks) - 1) * parameter_count(blocks[0]) for _, blocks in lists)
    return equal if parameter_count(full) - parameter_count(small) == left_out else {}


def _all_equal(blocks: Sequence[nn.Module]) -> bool:
    first = list(_facts(blocks[0]))
    return all(_equal(first, list(_facts(block)), index) for index, block in enumerate(blocks))


def _equal(first: list[tuple[object, ...]], facts: list[tuple[object, ...]], index: int) -> bool:
    """Return whether a block equals the first block. Integers may be larger by `index`."""
    return len(first) == len(facts) and all(
        a == b or (a[:-1] == b[:-1] and type(a[-1]) is int and type(b[-1]) is int and b[-1] - a[-1] == index)
        for a, b in zip(first, facts, strict=True)
    )


def _facts(block: nn.Module) -> Iterator[tuple[object, ...]]:
    for name, module in block.named_modules():
        yield name, type(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield name, key, tensor.shape, tensor.dtype, tensor.requires_grad
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str | type(None)):
                yield name, key, value
