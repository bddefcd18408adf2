"""Leave out an evaluation's calls that only repeat the allocations of earlier calls."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from zerofit.simulate.ops.issued import COPY, KERNEL, ON_HOST, IssuedWork
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value

_ALONE = (KERNEL, ON_HOST, COPY)  # work for which no stream or rank waits
_PLAIN = (str, int, float, torch.dtype, torch.device, type(None))


@dataclass
class _Calls:
    """The calls of a module with inputs of the same shapes in one phase."""

    changes: list[int] = field(default_factory=list)  # in bytes, of the last call's allocations and releases
    outputs: bytes = b""  # pickled, without the tensors' data, if later calls may be left out
    start: int = -1  # the most live bytes at which a call started
    issued: list[IssuedWork] = field(default_factory=list)  # the last call's kernels, in the step whose time is known
    flops: int = 0  # of the last call


class Repeats:
    """Runs calls without gradients in full, until a call repeats the last call's allocations.

    Later calls with the same shapes only allocate their outputs. But if more bytes are live at the start of a call than
    at the start of every earlier call, this call runs in full. So peaks stay exact.
    """

    def __init__(self, meter: ScriptTracker):
        self._meter = meter
        self._phase = 0
        self._calls: WeakKeyDictionary[nn.Module, dict[Hashable, _Calls]] = WeakKeyDictionary()
        self._is_running = False  # calls inside of a running one belong to it

    def __call__(
        self,
        method: Callable[..., object],
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Call the module's method, or return outputs like those of the call before."""
        if torch.is_grad_enabled() or self._is_running:
            return method(module, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if not all(isinstance(leaf, (*_PLAIN, Tensor)) for leaf in leaves):
            return method(module, *args, **kwargs)
        if self._phase != len(self._meter.ledger.marks):
            self._phase = len(self._meter.ledger.marks)
            self._calls.clear()
        key = repr(spec), module.training, *(_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        calls = self._calls.setdefault(module, {}).setdefault(key, _Calls())
        if calls.outputs and self._meter.live() <= calls.start:
            name = type(module).__name__
            self._meter.note(f"calls of {name} that repeat the allocations of earlier ones: left out", here=True)
            self._issue(calls)
            return _LayoutReader(io.BytesIO(calls.outputs)).load()
        self._is_running = True
        try:
            return self._run(calls, method, module, args, kwargs)
        finally:
            self._is_running = False

    def _run(
        self,
        calls: _Calls,
        method: Callable[..., object],
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        ledger, before, log = self._meter.ledger, calls.changes, self._meter.streams.issued
        calls.start, begin = max(calls.start, self._meter.live()), len(ledger.events)
        first, flops = self._meter.streams.place, self._meter.flops.total()
        out = method(module, *args, **kwargs)
        calls.changes = [change for _, change in ledger.events[begin:]]
        calls.flops, items = self._meter.flops.total() - flops, log.items[first:] if log else []
        calls.issued = [work for work in items if isinstance(work, IssuedWork) and work.kind in _ALONE]
        repeats = calls.changes == before and len(calls.issued) == len(items)
        calls.outputs = _described(out, sum(before)) if repeats else b""
        return out

    def _issue(self, calls: _Calls) -> None:
        """Record the kernels of a call that is left out, if the time of this step is forecast."""
        streams = self._meter.streams
        if streams.issued is not None:
            streams.issued.items += [work._replace(t=streams.now) for work in calls.issued]
            self._meter.count_flops(calls.flops)


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size and stride


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _described(outputs: object, allocated: int) -> bytes:
    """Return outputs without data; b"" if their tensors do not have `allocated` bytes."""
    file = io.BytesIO()
    writer = _LayoutWriter(file)
    try:
        writer.dump(outputs)
    except (pickle.PicklingError, TypeError, AttributeError):  # objects that cannot be pickled
        return b""
    return file.getvalue() if sum(tensor.nbytes for tensor in writer.tensors.values()) == allocated else b""


class _LayoutWriter(pickle.Pickler):
    """Writes each tensor's id and layout instead of its data.

    Raises PicklingError for tensors of known values.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}  # by id

    def persistent_id(self, obj: object) -> tuple[int, _Layout] | None:
        """Return a tensor's id and layout; None for other objects."""
        if not isinstance(obj, Tensor):
            return None
        if type(obj) is not FakeTensor or known_value(obj) is not None:
            raise pickle.PicklingError
        self.tensors.setdefault(id(obj), obj)
        return id(obj), _layout(obj)


class _LayoutReader(pickle.Unpickler):
    """Allocates a tensor for each id."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: tuple[int, _Layout]) -> Tensor:
        """Return the tensor of this id."""
        which, (size, stride, dtype, device) = pid
        if which not in self._tensors:
            self._tensors[which] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return self._tensors[which]
