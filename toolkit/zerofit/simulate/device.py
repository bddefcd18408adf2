"""A GPU that is not there: a device type of its own for torch, and the accelerator that DeepSpeed sees in its place.

Tensors on it exist as fakes only. What DeepSpeed asks of a GPU is answered as its CUDA accelerator would answer
(accelerator/cuda_accelerator.py); streams and events do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zerofit.simulate.ledger import PINNED
from zerofit.simulate.tracker import AllocationTracker

NAME = "simgpu"


def install_gpu(meter: AllocationTracker, device_bytes: int) -> None:
    """Make the device known to torch and DeepSpeed. To be called before anything asks for the accelerator."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    real_accelerator.set_accelerator(SimulatedGpu(meter, device_bytes))


def install_host(meter: AllocationTracker, device_bytes: int) -> None:
    """Let DeepSpeed compute on a CPU of this size."""
    real_accelerator.set_accelerator(SimulatedHost(meter, device_bytes))


class _Backend:
    """What torch asks of a device's module."""

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass


class _FakeStream:
    """Ops are issued in order; there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


class SimulatedHost(CPU_Accelerator):
    """The CPU accelerator with as much memory as is said."""

    def __init__(self, meter: AllocationTracker, device_bytes: int):
        super().__init__()
        self._meter, self._device_bytes = meter, device_bytes

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        return self._device_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device that no tensor has."""
        return max(0, self._device_bytes - self._meter.live())

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of the device that tensors have."""
        return self._meter.live()


class SimulatedGpu(SimulatedHost):
    """A CUDA accelerator as far as DeepSpeed can see."""

    _torch_pins_host_memory = True

    def __init__(self, meter: AllocationTracker, device_bytes: int):
        super().__init__(meter, device_bytes)
        self._name, self._communication_backend_name = NAME, "fake"

    def is_synchronized_device(self) -> bool:
        """Ops are issued ahead of the device, as on CUDA."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """The device's name for torch."""
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is current."""
        return nullcontext()

    def current_device(self) -> int:
        """There is one."""
        return 0

    def current_device_name(self) -> str:
        """The one device."""
        return f"{NAME}:0"

    def device_count(self) -> int:
        """There is one."""
        return 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == NAME

    def is_fp16_supported(self) -> bool:
        """Every GPU of the catalogue has it."""
        return True

    def empty_cache(self) -> None:
        """Give cached memory back to the driver."""
        self._meter.ledger.empty_cache()

    @property
    def Stream(self) -> type[_FakeStream]:
        """The class of streams."""
        return _FakeStream

    @property
    def Event(self) -> type[_FakeStream]:
        """The class of events."""
        return _FakeStream

    def stream(self, stream: Any) -> Any:
        """A context in which a stream is current."""
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The only stream."""
        return _FakeStream()

    default_stream = current_stream

    pin_memory = DeepSpeedAccelerator.pin_memory  # the CPU's does nothing

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._meter.pin(pinned)
        return pinned

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        pinned = tensor.new_empty(shape)
        self._meter.pin(pinned)
        return pinned

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = self._meter.storage_of(tensor)
        return storage is not None and storage.place == PINNED
