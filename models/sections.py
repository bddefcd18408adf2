"""Divide a model into sections to measure: embedding, blocks, head, or a pipeline's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import torch
from torch import nn

from zerofit.models.build import empty_batch, fake_tensors, forward_logits, forward_named
from zerofit.models.catalog import ModelError
from zerofit.models.denoisers import is_denoiser
from zerofit.models.depth import Path, depths
from zerofit.models.inputs import Inputs, NamedInputs
from zerofit.models.layers import as_layers
from zerofit.spec.errors import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# modules of the inner models of a config
_INNER_MODULES = {
    "text_config": ("text_model", "language_model"),
    "vision_config": ("vision_model", "vision_tower", "visual"),
}

_CHECKPOINT = "_gradient_checkpointing_func"  # transformers' hook

Mark = Callable[[int, object], None]  # called with a section's index and its inputs


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """A part of the forward, from the start of the module or, with `after`, from its return."""

    name: str
    start: nn.Module | None  # None: begins with the model
    after: bool = False  # begins when `start` has returned
    count: int = 1  # number of such consecutive sections in the real model


@contextmanager
def watched(sections: list[ModelSection], begin: Mark) -> Iterator[None]:
    """Inside this context, `begin(index, inputs)` is called when a section of a forward begins."""
    # Hooks on the first module of each section report where a forward is. Recomputation in backward also runs the
    # hooks.
    inside: set[int] = set()  # running checkpoints, whose inner forwards must not begin a section again

    def before(index: int, module: nn.Module, args: object, kwargs: object) -> None:
        if index not in inside:
            begin(index, (args, kwargs))

    def after(index: int, module: nn.Module, args: object, output: object) -> None:
        begin(index, output)

    def checkpointed(
        index: int, checkpoint: Callable[..., object], function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        begin(index, (args, getattr(function, "keywords", {})))
        inside.add(index)
        try:
            return checkpoint(function, *args, **kwargs)
        finally:
            inside.discard(index)

    with ExitStack() as stack:
        for index, section in enumerate(sections):
            if section.start is None:
                continue
            if section.after:
                handle = section.start.register_forward_hook(partial(after, index))
            else:
                handle = section.start.register_forward_pre_hook(partial(before, index), with_kwargs=True)
                # Blocks of transformers before 5.23 checkpoint themselves in __call__, so their hooks run inside the
                # checkpoint. The input that it saves must count for this block (transformers/modeling_layers.py).
                own_call = type(section.start).__call__ is not nn.Module.__call__
                checkpoint = vars(section.start).get(_CHECKPOINT)
                if own_call and checkpoint is not None and getattr(section.start, "gradient_checkpointing", False):
                    checkpoint_marked = partial(checkpointed, index, checkpoint)
                    stack.enter_context(patch.dict(vars(section.start), {_CHECKPOINT: checkpoint_marked}))
            stack.callback(handle.remove)
        yield


def sections_of(model: nn.Module) -> list[ModelSection]:
    """Return all sections of a model."""
    lists = block_lists(model, None) if hasattr(model, "config") else []
    # for an encoder and a decoder, only a run shows which comes first
    return block_sections([(lists[0][0], None)]) if len(lists) == 1 else stage_sections(model)


def numbered(names: Sequence[str]) -> list[str]:
    """Number names that occur several times: "block.0", "block.1", ...

    >>> numbered(["embedding", "block", "block", "head"])
    ['embedding', 'block.0', 'block.1', 'head']
    """
    counts, seen = Counter(names), Counter[str]()
    numbered_names = []
    for name in names:
        numbered_names.append(f"{name}.{seen[name]}" if counts[name] > 1 else name)
        seen[name] += 1
    return numbered_names


def block_lists(model: nn.Module, inputs: Inputs | None) -> list[tuple[nn.ModuleList, Path]]:
    """Return lists of blocks with the config keys that count them, as the forward runs them."""
    known, named_lists = depths(cast("PreTrainedModel", model).config), []
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _, _ in named_lists)
        if not isinstance(module, nn.ModuleList) or inside or len({type(block) for block in module}) != 1:
            continue
        # a config has the encoder's depth first; inner models are named like their configs
        path = next(
            (path for path, count in known.items() if count == len(module) and _counts_layers(path, name)), None
        )
        if path is not None:
            named_lists.append((name, module, path))
    lists = [(module, path) for _, module, path in named_lists]
    has_inner = any(len(path) > 1 for _, path in lists)  # GIT's image encoder does not run without images
    return _in_run_order(model, inputs, lists) if inputs is not None and (has_inner or len(lists) > 1) else lists


def _counts_layers(path: Path, name: str) -> bool:
    """Return whether the config's key at this path counts the layers of the module `name`."""
    parts, key = set(name.split(".")), path[-1]
    if len(path) > 1:
        return bool(parts & set(_INNER_MODULES[path[0]]))
    if "decoder" in parts or "encoder" in parts:
        return key == "num_hidden_layers" or ("decoder" in parts) == (key in ("decoder_layers", "num_decoder_layers"))
    return key == "num_hidden_layers"


def _in_run_order(
    model: nn.Module, inputs: Inputs, lists: list[tuple[nn.ModuleList, Path]]
) -> list[tuple[nn.ModuleList, Path]]:
    # The order of attributes is not the order of execution. So one forward on fake tensors records it.
    run_order: list[int] = []
    handles = [
        blocks[0].register_forward_pre_hook(lambda *_, index=index: run_order.append(index))
        for index, (blocks, _) in enumerate(lists)
    ]
    try:
        with torch.device("meta"), torch.no_grad(), fake_tensors():
            batch = empty_batch(inputs, 1)
            if isinstance(inputs, NamedInputs):
                forward_named(model, inputs, batch)
            else:
                forward_logits(model, batch["inputs"])
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        message = f"{type(model).__name__} cannot run with these inputs: {reason_of(error)}"
        raise ModelError("model-shape", message, "correct --model-args or the config") from error
    finally:
        for handle in handles:
            handle.remove()
    return [lists[index] for index in dict.fromkeys(run_order)]


# How sections divide the forward of a language model:
#
#     embedding          block           block           head
#     |------------------|---------------|---------------|---------->
#     start of forward   block 0 begins  block 1 begins  last block has returned
#
# With an encoder and a decoder, "between" is the part after the encoder's last block.
def block_sections(lists: list[tuple[nn.ModuleList, int | None]]) -> list[ModelSection]:
    """Return sections for the embedding, each block and the head.

    What runs between two lists of blocks is a section, too. If a list has a count, its last block represents all
    further equal blocks.
    """
    sections, before = [ModelSection(name="embedding", start=None)], None
    for blocks, count in lists:
        if before is not None:
            sections.append(ModelSection(name="between", start=before[-1], after=True))
        counts = [1] * len(blocks)
        if count:
            # The last block represents all blocks of its size. T5's first block also has the positions, and DeepSeek's
            # first blocks have no experts.
            sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
            alone = [int(size != sizes[-1]) for size in sizes[:-1]]
            counts = [*alone, count - sum(alone)]
        sections += [ModelSection(name="block", start=block, count=n) for block, n in zip(blocks, counts, strict=True)]
        before = blocks
    assert before is not None  # there is at least one list
    return [*sections, ModelSection(name="head", start=before[-1], after=True)]


def stage_sections(model: nn.Module) -> list[ModelSection]:
    """Return a section for each pipeline layer, else for each child of the model."""
    if is_denoiser(model):
        return _denoiser_sections(model)
    try:
        layers = [(layer.name, list(layer.names.values())) for layer in as_layers(model)]
    except ModelError:
        layers = [(name, [f"{name}.{p}" for p, _ in child.named_parameters()]) for name, child in _children(model)]
    sections = []
    modules = dict(model.named_modules())
    for name, paths in layers:
        if paths:
            # the layer's own module if the model has it, else the module of its first parameter
            module = modules[name] if name in modules else modules[paths[0].rpartition(".")[0]]
            sections.append(ModelSection(name=name, start=module if sections else None))
    return sections or [ModelSection(name="model", start=None)]


def _denoiser_sections(model: nn.Module) -> list[ModelSection]:
    parts = []
    for name in ("down_blocks", "mid_block", "up_blocks", "transformer_blocks", "single_transformer_blocks"):
        part = getattr(model, name, None)
        parts += list(part) if isinstance(part, nn.ModuleList) else [part] if part is not None else []
    blocks = [ModelSection(name="block", start=block) for block in parts]
    return [ModelSection(name="embedding", start=None), *blocks, ModelSection(name="head", start=parts[-1], after=True)]


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name, child
