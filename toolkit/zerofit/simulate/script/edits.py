"""Apply changes that a user could make in a script, to simulate the changed training."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import cast

import torch
from torch import nn
from torch.optim.optimizer import ParamsT, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.command import CHECKPOINTS, EIGHT_BITS, HALVES, SHARDED, SHARDED_STATES, ScriptTarget
from zerofit.simulate.script.errors import not_simulated

_ONLY_TORCH = ("foreach", "fused", "capturable", "differentiable", "maximize")  # that bitsandbytes does not accept


def edits(target: ScriptTarget) -> Callable[[nn.Module], None]:
    """Patch functions that a script calls, so that the edits in `target` take effect.

    Return a function that must be called with each model before the model's first forward.
    """
    ours = {
        EIGHT_BITS: _eight_bits,
        HALVES: _halves,
        SHARDED: _sharded,
        SHARDED_STATES: _sharded_states,
    }
    for name in target.edits:
        if name in ours:
            ours[name]()
    return recompute_blocks if CHECKPOINTS in target.edits else lambda model: None


def recompute_blocks(model: nn.Module) -> None:
    """Recompute a model's repeated blocks in backward, by the model's own switch if it has one."""
    enable = getattr(unwrapped(model), "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
        return
    # `forward` stays an attribute of the block, so parameters keep their names and hooks still run
    for block in repeated_blocks(model)[1]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that wrappers such as DistributedDataParallel contain."""
    inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) and inner is not model else model


def repeated_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the path and the blocks of the list of equal blocks that has the most parameters.

    Return ("", []) if there is no list.
    """
    best, found = 0, ("", list[nn.Module]())
    for path, module in unwrapped(model).named_modules():
        children = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        blocks = [child for child in children if child is not None]  # libraries put None where a block has no layer
        size = sum(1 for block in blocks for _ in block.parameters())  # lazy ones have no elements yet
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and size > best:
            best, found = size, (path, blocks)
    return found


def _optimizers(make: Callable[..., object]) -> None:
    """Replace torch's optimizers by the result of `make(original, parameters, ...)`.

    (torch.optim.Adam, AdamW)
    """
    for name in ("Adam", "AdamW"):
        original = getattr(torch.optim, name)

        def new(cls: type, *args: object, original: type = original, **kwargs: object) -> object:
            return make(original, *args, **kwargs)

        # a class for isinstance(); a __new__ that returns another class skips __init__
        replace_in(torch.optim, name, type(name, (original,), {"__new__": new}))


def _eight_bits() -> None:
    library = importlib.import_module("bitsandbytes.optim")

    def make(original: type, *args: object, **kwargs: object) -> object:
        known = {key: value for key, value in kwargs.items() if key not in _ONLY_TORCH}
        return getattr(library, f"{original.__name__}8bit")(*args, **known)

    _optimizers(make)


def _sharded_states() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded_optimizer = cast("Callable[..., object]", ZeroRedundancyOptimizer)

    def make(original: type, parameters: ParamsT, *args: object, **kwargs: object) -> object:
        names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
        return sharded_optimizer(parameters, original, **dict(zip(names, args, strict=False)), **kwargs)

    _optimizers(make)


def _sharded() -> None:
    """Shard a model with FSDP2 instead of wrapping it in DDP.

    (torch.nn.parallel.DistributedDataParallel)
    """
    from torch.distributed.fsdp import fully_shard

    replaced: list[weakref.ref[nn.Parameter]] = []  # weak, since their memory is freed

    def new(cls: type, module: nn.Module, *_: object, **__: object) -> nn.Module:
        replaced.extend(weakref.ref(parameter) for parameter in module.parameters())
        # blocks first: the outer call shards only the parameters that no inner call has sharded
        for block in repeated_blocks(module)[1]:
            fully_shard(block)
        fully_shard(module)
        # attributes of the wrapper that scripts use; not registered, so the model does not contain itself
        module.__dict__.update(module=module, no_sync=nullcontext)
        return module

    def refuse_stale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stale = {id(parameter) for weak in replaced if (parameter := weak()) is not None}
        if any(id(p) in stale for group in optimizer.param_groups for p in group["params"]):
            raise not_simulated("an optimizer that was made before fully_shard", "make it after fully_shard")

    original = nn.parallel.DistributedDataParallel
    replace_in(nn.parallel, "DistributedDataParallel", type(original.__name__, (original,), {"__new__": new}))
    register_optimizer_step_pre_hook(refuse_stale)


def _halves() -> None:
    """Load batches of half the size, and step after every second one.

    (DataLoader.__init__, Optimizer.__init__, Module.zero_grad)
    """
    load: Callable[..., None] = DataLoader.__init__
    make: Callable[..., None] = torch.optim.Optimizer.__init__
    zero: Callable[..., None] = nn.Module.zero_grad
    waiting: set[int] = set()  # ids of optimizers that have gradients of the first of two batches

    def loader(
        self: DataLoader[object], dataset: object, batch_size: int | None = 1, *args: object, **kwargs: object
    ) -> None:
        if type(self) is DataLoader and batch_size and batch_size > 1:
            batch_size //= 2
        load(self, dataset, batch_size, *args, **kwargs)

    def optimizer(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        # on the instance, since each optimizer's class has a `step` of its own
        vars(self).update(step=MethodType(step, self), zero_grad=MethodType(zero_grad, self))

    def step(self: torch.optim.Optimizer, closure: object = None, **kwargs: object) -> object:
        if closure is not None:
            raise not_simulated("a closure that computes only half of a batch", "simulate without the change")
        if id(self) not in waiting:
            return waiting.add(id(self))
        waiting.remove(id(self))
        step_of_kind = cast("Callable[..., object]", type(self).step)
        return step_of_kind(self, **kwargs)

    def zero_grad(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        if id(self) not in waiting:
            zero_of_kind: Callable[..., None] = type(self).zero_grad
            zero_of_kind(self, *args, **kwargs)

    def zero_module(self: nn.Module, *args: object, **kwargs: object) -> None:
        if not waiting:
            zero(self, *args, **kwargs)

    replace_in(DataLoader, "__init__", loader)
    replace_in(torch.optim.Optimizer, "__init__", optimizer)
    replace_in(nn.Module, "zero_grad", zero_module)
