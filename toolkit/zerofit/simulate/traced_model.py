"""The model that a trace runs: few blocks for many equal ones, one rank's shard of it, cut into units."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerofit.models.build import build
from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.dtypes import DTYPES
from zerofit.models.hf import make_config
from zerofit.models.inputs import Inputs
from zerofit.models.layers import as_layers
from zerofit.simulate.tensor_parallel import shard
from zerofit.train.build import batch_norm_in_fp32

TRACED_BLOCKS = 2  # the first may make what all share, so the second stands for all
Mark = Callable[[int, Any], None]  # of a unit that begins, and the tensors it gets


@dataclass(frozen=True, kw_only=True)
class TracedSection:
    """A stretch of the forward whose costs are told apart; it begins where `start` is called or has returned."""

    name: str
    start: nn.Module | None  # None: begins with the model
    after: bool = False  # begins when `start` has returned
    count: int = 1  # how many such follow each other in the real model


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model on the meta device that is ready to be traced."""

    model: nn.Module
    units: list[TracedSection]
    config: Any = None  # transformers' config of the whole model


def make_subject(
    source: ModelSource, inputs: Inputs | None, args: dict[str, Any], precision: str, checkpointing: bool, tp: int
) -> TracedModel:
    """The model as a rank has it, its parameters in the precision's dtype and its buffers as built.

    Raises ModelError where it has no tensor parallel form.
    """
    config = make_config(source, inputs, args) if source.family == "transformers" else None
    blocks = _equal_blocks(config)
    small: dict[str, Any] = {**args, "num_hidden_layers": TRACED_BLOCKS} if blocks else args
    with torch.device("meta"):
        model = build(source, inputs, small, checkpointing=checkpointing)
    found = _block_list(model) if config is not None else None
    if tp > 1:
        if found is None:
            raise ModelError("profile-tp", f"{source.name} has no blocks that tensor parallelism splits")
        shard(model, found, tp)
    _cast(model, precision)
    units = _block_units(found, blocks) if found else _stage_units(model)
    return TracedModel(model=model.train(), units=units, config=config)


@contextmanager
def watched(units: list[TracedSection], begin: Mark) -> Iterator[None]:
    """Call `begin(unit, its inputs)` as the units of a forward begin."""
    handles = []

    def before(index: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: begin(index, inputs)

    for index, unit in enumerate(units):
        if unit.start is None:
            continue
        if unit.after:
            handles.append(unit.start.register_forward_hook(lambda m, i, out, n=index: begin(n, out)))
        else:
            handles.append(unit.start.register_forward_pre_hook(before(index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(tensors: Any) -> Tensor | None:
    """The first tensor that autograd follows."""
    return next((t for t in tree_leaves(tensors) if isinstance(t, Tensor) and t.requires_grad), None)


def _cast(model: nn.Module, precision: str) -> None:
    if precision == "fp32":
        return
    for parameter in model.parameters():  # buffers keep their dtype (deepspeed/runtime/engine.py:1851)
        parameter.data = parameter.data.to(DTYPES[precision])
    batch_norm_in_fp32(model)


def _equal_blocks(config: Any) -> int | None:
    """How many equal blocks a config stands for; None where they differ, or are too few to leave any out."""
    count = getattr(config, "num_hidden_layers", None)
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    mixed = any(getattr(config, key, None) for key in ("first_k_dense_replace", "mlp_only_layers"))
    if count is None or count <= TRACED_BLOCKS or len(kinds) > 1 or mixed:
        return None
    return count


def _block_list(model: nn.Module) -> nn.ModuleList | None:
    count = getattr(model.config, "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return next((m for m in lists if len({type(block) for block in m}) == 1), None)


def _block_units(blocks: nn.ModuleList, count: int | None) -> list[TracedSection]:
    """Embedding, blocks, head; with `count` equal blocks the last one of the traced stands for all of them."""
    units = [TracedSection(name="embedding", start=None)]
    counts = [0] * (len(blocks) - 1) + [count] if count else [1] * len(blocks)
    units += [TracedSection(name="block", start=block, count=n) for block, n in zip(blocks, counts, strict=True)]
    return [*units, TracedSection(name="head", start=blocks[-1], after=True)]


def _stage_units(model: nn.Module) -> list[TracedSection]:
    """The layers that a pipeline would cut, else the model's own children; each begins at its first module."""
    try:
        layers = [(layer.name, list(layer.names.values())) for layer in as_layers(model)]
    except ModelError:
        layers = [(name, [f"{name}.{p}" for p, _ in child.named_parameters()]) for name, child in _children(model)]
    units = []
    for name, paths in layers:
        if paths:
            module = _first_called(model, name, paths)
            units.append(TracedSection(name=name, start=module if units else None))
    return units or [TracedSection(name="model", start=None)]


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name, child


def _first_called(model: nn.Module, name: str, paths: list[str]) -> nn.Module:
    """The layer's own module where the model calls it as such, else the module of its first parameter."""
    inside = dict(model.named_modules())
    return inside[name] if name in inside else inside[paths[0].rpartition(".")[0]]


def takes_labels(model: nn.Module) -> bool:
    """Whether a model of the user's own computes its loss itself."""
    return "labels" in inspect.signature(model.forward).parameters
