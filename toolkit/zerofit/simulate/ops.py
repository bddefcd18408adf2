"""DeepSpeed's C++ ops with nothing behind them: they work in place, so that memory is decided in Python."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerofit.simulate.ledger import PINNED
from zerofit.simulate.tracker import AllocationTracker


def fake_op(name: str, meter: AllocationTracker) -> Any:
    """Return a stand-in for what the builder of this op (its NAME) would have loaded."""
    return _AsyncIO(meter) if name == "async_io" else _InPlace()


class _InPlace:
    """Functions of any name that change their arguments in place and return 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


class _AsyncIO:
    """The async_io module: what it is told to write is added up, what it reads is there."""

    def __init__(self, meter: AllocationTracker):
        self._meter = meter

    def aio_handle(self, *_: Any, **__: Any) -> _Handle:
        return _Handle(self._meter)


class _Handle:
    """deepspeed's aio_handle, as far as its swappers ask: a request done for every one made."""

    def __init__(self, meter: AllocationTracker):
        self._meter, self._pending = meter, 0

    def async_pwrite(self, buffer: Tensor, path: str, offset: int = 0) -> int:
        size = offset + buffer.numel() * buffer.element_size()
        self._meter.files[path] = max(self._meter.files[path], size)
        self._pending += 1
        return 0

    def async_pread(self, buffer: Tensor, path: str, offset: int = 0) -> int:
        self._pending += 1
        return 0

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def is_pinned(self, tensor: Tensor) -> bool:
        storage = self._meter.storage_of(tensor)
        return self._meter.device == "cpu" or (storage is not None and storage.place == PINNED)

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        tensor = like.new_empty(count, device="cpu")
        self._meter.pin(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return True
