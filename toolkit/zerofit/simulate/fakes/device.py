"""Simulate a GPU: a new device type for torch, and an accelerator for DeepSpeed.

Tensors on the device are always fake. The accelerator returns the same values as DeepSpeed's CUDA accelerator
(accelerator/cuda_accelerator.py). DeepSpeed's C++ ops are replaced by functions that do nothing: the real ops
allocate no memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zerofit.simulate.memory.ledger import LOCKED
from zerofit.simulate.ops.streams import SimulatedEvent, SimulatedStream
from zerofit.simulate.ops.tracker import AllocationTracker

NAME = "simgpu"
# ctypes raises the error that is set when the call returns. It is bound here: Python clears an error that is set while
# it looks for an attribute in a type that lacks it (find_name_in_mro in CPython's Objects/typeobject.c)
_raise_error_that_is_set = ctypes.pythonapi.PyErr_Occurred
_native: Any = torch._C  # type stubs lack these
_autograd: Any = torch.autograd
_BACKEND = SimpleNamespace(  # the functions that torch needs of a device's module
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: None,
)


def install(gpu: bool, meter: AllocationTracker, device_bytes: int) -> None:
    """Make DeepSpeed use a device with `device_bytes` of memory.

    Must be called before anything reads the accelerator.
    """
    if gpu:
        register(meter)
    real_accelerator.set_accelerator((SimulatedGpu if gpu else SimulatedHost)(meter, device_bytes))


def register(meter: AllocationTracker) -> None:
    """Register the simulated device.

    If a backward hook fails, raise the hook's error in the script's thread. (torch.autograd._engine_run_backward)
    """
    # If a hook fails, a Python error is set. While autograd's thread passes this error on, torch calls the method
    # `type_` of the device's guard. This would end the process, because a Python method must not return a value while
    # an error is set (torch/csrc/acc/Module.cpp, PythonDeviceGuard). So the guard clears and stores the error, and
    # `run_backward` raises it after the backward.
    guard, run = _SimulatedGuard(), _autograd._engine_run_backward

    def run_backward(*args: object, **kwargs: object) -> object:
        try:
            return run(*args, **kwargs)
        except SystemError as error:
            raise guard.pending or meter.failed or error from None
        finally:
            guard.pending = None

    _setup_privateuseone_for_python_backend(NAME, backend_module=_BACKEND, device_guard=guard)
    _autograd._engine_run_backward = run_backward


class _SimulatedGuard(_native._acc.DeviceGuard):
    """The device's guard. If torch calls it while a Python error is set, it keeps the error."""

    pending: BaseException | None = None

    def type_(self) -> object:
        try:
            _raise_error_that_is_set()
        except BaseException as error:  # of the script's code
            self.pending = error
        return _native._autograd.DeviceType.PrivateUse1


# earlier releases of DeepSpeed pin memory in each accelerator
_TORCH_PINS = hasattr(DeepSpeedAccelerator, "_torch_pins_host_memory")


class SimulatedHost(CPU_Accelerator):
    """The CPU accelerator with a given amount of memory."""

    def __init__(self, meter: AllocationTracker, device_bytes: int):
        super().__init__()
        self._meter, self._device_bytes = meter, device_bytes

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the device's memory in bytes."""
        return self._device_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the device's free memory in bytes."""
        # decides where ZeRO 1 and 2 flatten the parameters (stage_1_and_2.py, flatten_on_accelerator)
        return max(0, self._device_bytes - self._meter.live())

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of live tensors on the device."""
        return self._meter.live()


class SimulatedGpu(SimulatedHost):
    """A CUDA accelerator for DeepSpeed.

    `name`: the device's type in Python. `index`: this rank's device among the node's `count` devices.
    """

    _torch_pins_host_memory = True

    def __init__(
        self,
        meter: AllocationTracker,
        device_bytes: int,
        name: str = NAME,
        backend: str = "fake",
        index: int = 0,
        count: int = 1,
    ):
        super().__init__(meter, device_bytes)
        self._name, self._communication_backend_name = name, backend
        self._index, self._count = index, count

    def is_synchronized_device(self) -> bool:
        """Return False: as on CUDA, ops are issued before the device has run the earlier ones."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device's type, with the index if one is given."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which this device is the current one."""
        return nullcontext()

    def current_device(self) -> int:
        """Return the index of this rank's device."""
        return self._index

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        return f"{self._name}:{self._index}"

    def device_count(self) -> int:
        """Return the number of devices per node."""
        return self._count

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device.type == self._name

    def is_fp16_supported(self) -> bool:
        """Return True: every GPU in the catalog supports fp16."""
        return True

    def empty_cache(self) -> None:
        """Release cached memory to the driver."""
        self._meter.ledger.empty_cache()

    @property
    def Stream(self) -> type[SimulatedStream]:
        """The class of streams."""
        return self._meter.streams.Stream

    @property
    def Event(self) -> type[SimulatedEvent]:
        """The class of events."""
        return self._meter.streams.Event

    def stream(self, stream: SimulatedStream | None) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the current stream."""
        return self._meter.streams.using(stream)

    def current_stream(self, device_index: int | None = None) -> SimulatedStream:
        """Return the stream that this thread issues work to."""
        return self._meter.streams.current

    def default_stream(self, device_index: int | None = None) -> SimulatedStream:
        """Return the default stream."""
        return self._meter.streams.default

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all streams."""
        self._meter.streams.synchronize()

    def pin_memory(self, tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return a copy in pinned memory. The CPU accelerator's own method does nothing."""
        if _TORCH_PINS:
            pin = cast("Callable[..., Tensor]", DeepSpeedAccelerator.pin_memory)
            return pin(self, tensor, *args, **kwargs)
        return self._torch_pin_memory(tensor)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return DeepSpeedAccelerator.is_pinned(self, tensor) if _TORCH_PINS else self._torch_is_pinned(tensor)

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self._meter.pin(pinned)
        return pinned

    def _torch_empty_pinned(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        pinned = tensor.new_empty(shape)
        self._meter.pin(pinned)
        return pinned

    def _torch_is_pinned(self, tensor: Tensor) -> bool:
        return self._meter.is_pinned(tensor)


class FakeOps:
    """DeepSpeed's C++ ops.

    All functions except these change their arguments in place and return 0.
    """

    def __init__(self, meter: AllocationTracker):
        self._meter = meter

    def aio_handle(self, *_: object, **__: object) -> _AsyncHandle:
        """Return a handle for reading and writing host memory."""
        return _AsyncHandle(self._meter)

    gds_handle = aio_handle  # of device memory

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # else copy and pickle would call a function that does nothing
            raise AttributeError(name)

        def work(*args: object, **_: object) -> int:
            self._meter.ran(name, args)
            return 0

        return work


class _AsyncHandle:
    """A handle for DeepSpeed's swappers.

    A write records the file's size. A read does nothing. Every request is complete when `wait` is called.
    """

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

    # DeepSpeed's swappers assert that this is the number of their requests (runtime/swap_tensor)
    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._meter.device == "cpu" or self._meter.is_pinned(tensor)

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        tensor = like.new_empty(count, device="cpu")
        self._meter.pin(tensor, LOCKED)  # not by torch's allocator, which rounds sizes up and caches blocks
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return True

    def pin_device_tensor(self, tensor: Tensor) -> bool:
        return True
