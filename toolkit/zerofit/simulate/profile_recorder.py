"""What a forward and a backward on the meta device allocate, compute and move, section by section."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.simulate.flops import flops_of

_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh")
Key = tuple[str, int]  # ("forward" or "backward", unit)


@dataclass
class GradientSegment:
    """A stretch of ops of one section, up to the next complete gradient of a parameter."""

    key: Key
    live: list[int] = field(default_factory=list)  # bytes alive after each op that allocates
    live_at_end: int = 0  # bytes, the complete gradient included
    parameter: int | None = None  # whose gradient is complete at its end, by its place in model.parameters()


@dataclass
class SectionWork:
    """What the ops of one section do."""

    flops: int = 0
    moved_bytes: int = 0
    kernels: int = 0


class ProfileRecorder(TorchDispatchMode):
    """Follows every storage from the op that makes it to its release.

    `mark` says which section the following ops belong to. Gradients of parameters leave the books once they are
    complete (`watch`): where they stay is the engine's business.
    """

    def __init__(self, model: nn.Module, scratch: Mapping[str, Callable[[Any, Any], int]]) -> None:
        super().__init__()
        self._model, self._scratch = model, scratch  # of an op's kernel: bytes of (args, out)
        self.live_bytes = 0
        self.segments: list[GradientSegment] = []
        self.work: dict[Key, SectionWork] = {}
        self.before: dict[Key, int] = {}  # bytes alive when a section began
        self.handed_on: dict[int, int] = {}  # bytes that a unit's forward gives to the next one
        self.last_op = ""
        # the model's own storages are known, and count nothing
        own = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
        self._sizes = {storage._cdata: storage.nbytes() for storage in own}

    def mark(self, phase: str, unit: int) -> None:
        """What follows belongs to this unit's forward or backward."""
        key = (phase, unit)
        self.segments.append(GradientSegment(key, [self.live_bytes]))
        self.before.setdefault(key, self.live_bytes)  # a shared module can begin twice
        self._work = self.work.setdefault(key, SectionWork())

    def watch(self) -> list[Any]:
        """Hooks that take each parameter's complete gradient away; gives their handles."""
        handles = []
        for index, parameter in enumerate(self._model.parameters()):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._taker(index)))
        return handles

    def _taker(self, index: int):
        def take(parameter: Tensor) -> None:
            last = self.segments[-1]
            last.parameter, last.live_at_end = index, self.live_bytes
            parameter.grad = None
            self.segments.append(GradientSegment(last.key))

        return take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.last_op = str(func)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in outputs:
            self._follow(tensor)
        scratch = self._scratch.get(func._overloadpacket._qualified_op_name)
        if scratch is not None:
            self.segments[-1].live.append(self.live_bytes + scratch(args, out))
        if _is_kernel(func):
            self._count(func, args, kwargs, out, outputs)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            # the storage's Python object lives exactly as long as the storage
            weakref.finalize(storage, self._release, key)
        self._sizes[key] = size
        self.live_bytes += size - (known or 0)
        self.segments[-1].live.append(self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        work = self._work
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        work.kernels += 1
        work.moved_bytes += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        work.flops += flops_of(func, args, kwargs, out)


_kernels: dict[Any, bool] = {}


def _is_kernel(func: Any) -> bool:
    """Whether an op launches anything: no views, no bare allocations."""
    known = _kernels.get(func)
    if known is None:
        alias = next((r.alias_info for r in func._schema.returns), None)
        view = alias is not None and not alias.is_write
        known = _kernels[func] = not view and func._overloadpacket.__name__ not in _FREE
    return known
