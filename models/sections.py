"""A model cut into sections whose costs are told apart: embedding, blocks and head, or what a pipeline would cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from zerofit.models.catalog import ModelError
from zerofit.models.layers import as_layers

Mark = Callable[[int, Any], None]  # of a section that begins, and the tensors it gets


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """A stretch of the forward whose costs are told apart; it begins where `start` is called or has returned."""

    name: str
    start: nn.Module | None  # None: begins with the model
    after: bool = False  # begins when `start` has returned
    count: int = 1  # how many such follow each other in the real model


@contextmanager
def watched(sections: list[ModelSection], begin: Mark) -> Iterator[None]:
    """Call `begin(section, its inputs)` as the sections of a forward begin."""
    handles = []

    def hook(index: int, module: nn.Module, *tensors: Any) -> None:
        begin(index, tensors[-1])  # the inputs before a section, the outputs after one

    for index, section in enumerate(sections):
        if section.start is None:
            continue
        if section.after:
            handles.append(section.start.register_forward_hook(partial(hook, index)))
        else:
            handles.append(section.start.register_forward_pre_hook(partial(hook, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sections_of(model: nn.Module) -> list[ModelSection]:
    """Return the sections of a whole model, each once."""
    found = block_list(model) if hasattr(model, "config") else None
    return block_sections(found) if found else stage_sections(model)


def numbered(names: Sequence[str]) -> list[str]:
    """Return names with a number each where several are equal: "block.0", "block.1", ...

    >>> numbered(["embedding", "block", "block", "head"])
    ['embedding', 'block.0', 'block.1', 'head']
    """
    counts, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        found.append(f"{name}.{seen[name]}" if counts[name] > 1 else name)
        seen[name] += 1
    return found


def block_list(model: Any) -> nn.ModuleList | None:
    """Return the blocks of a transformers model; None where they are not of one class."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return next((m for m in lists if len({type(block) for block in m}) == 1), None)


def block_sections(blocks: nn.ModuleList, count: int | None = None) -> list[ModelSection]:
    """Return embedding, blocks, head; with `count` equal blocks the last one of the traced stands for all of them."""
    sections = [ModelSection(name="embedding", start=None)]
    counts = [0] * (len(blocks) - 1) + [count] if count else [1] * len(blocks)
    sections += [ModelSection(name="block", start=block, count=n) for block, n in zip(blocks, counts, strict=True)]
    return [*sections, ModelSection(name="head", start=blocks[-1], after=True)]


def stage_sections(model: nn.Module) -> list[ModelSection]:
    """Return what a pipeline would cut, else the model's own children; each begins at its first module."""
    try:
        layers = [(layer.name, list(layer.names.values())) for layer in as_layers(model)]
    except ModelError:
        layers = [(name, [f"{name}.{p}" for p, _ in child.named_parameters()]) for name, child in _children(model)]
    sections = []
    inside = dict(model.named_modules())
    for name, paths in layers:
        if paths:
            # the layer's own module where the model calls it as such, else the module of its first parameter
            module = inside[name] if name in inside else inside[paths[0].rpartition(".")[0]]
            sections.append(ModelSection(name=name, start=module if sections else None))
    return sections or [ModelSection(name="model", start=None)]


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name, child
