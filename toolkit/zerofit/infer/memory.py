"""The memory of a forward, from fake tensors, and the peaks of this process and its GPUs."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.models.build import fake_tensors
from zerofit.spec.process import forget_resident_peak, resident_memory

Call = Callable[[nn.Module, torch.device], Iterable[Tensor] | None]
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's parameter names
_LARGE = 1 << 20  # bytes


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that a call needs in addition to the model's weights."""

    peak: int  # largest sum of live tensors
    returned: int  # bytes of the tensors that it returned


def activation_memory(model: nn.Module, device: torch.device, call: Call) -> ActivationMemory:
    """Return the memory that `call(model, device)` needs, by running it on fake tensors.

    Nothing is computed or allocated. The model may be on the meta device and is not changed. Kernels' own workspaces
    are not counted. Raises the errors of the call, and RuntimeError if the model reads values of tensors.
    """
    try:
        return _run(model, device, call)
    except RuntimeError:
        if next((p.dtype for p in model.parameters()), None) != torch.float32:
            raise
        # the grouped matmuls of mixtures of experts do not support fp32 on fake tensors
        # float32 needs twice the bytes of bfloat16.
        half = _run(copy.deepcopy(model).bfloat16(), device, call)
        return ActivationMemory(2 * half.peak, 2 * half.returned)


def _run(model: nn.Module, device: torch.device, call: Call) -> ActivationMemory:
    """Return the memory that `call` needs with a copy of the model whose tensors are fake."""
    fake = copy.deepcopy(model)
    with fake_tensors(), torch.no_grad():
        for module in fake.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device), False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        with _ActivationMeter([*fake.parameters(), *fake.buffers()]) as meter:
            returned = call(fake, device) or ()
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in returned}
    return ActivationMemory(meter.peak, sum(storages.values()))


# Storages, not tensors, are counted, since views share memory. An expired storage was freed before the current op.
class _ActivationMeter(TorchDispatchMode):
    """Counts the bytes of live storages that ops have created; `peak` is the largest count."""

    def __init__(self, weights: Iterable[Tensor]):
        super().__init__()
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self._alive = {key: alive for key, alive in self._alive.items() if not alive[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


# The CPU's limit in --max-memory is compared with resident memory. Gaps that glibc keeps would count as used memory.
# By default glibc raises its limit for "large" to 32 MiB once such blocks are freed. It then keeps the gaps between
# smaller blocks: about 200 MB after a few forwards of a language model.
def return_freed_memory_at_once() -> None:
    """Make glibc return large blocks to the system as soon as they are freed.

    Other C libraries are not changed.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _LARGE)
            mallopt(_TRIM_THRESHOLD, _LARGE)


def start_counting(gpus: Iterable[int]) -> int:
    """Reset the peaks of this process and of these GPUs; return this process's resident bytes.

    If the peak of the process cannot be reset, peaks count from the process's start, and the peak so far is returned.
    """
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    forget_resident_peak()
    return resident_memory().peak


def peak_device_bytes(gpus: Iterable[int]) -> int | None:
    """Return the largest allocation on a GPU since `start_counting`; None without GPUs."""
    return max((torch.cuda.max_memory_allocated(gpu) for gpu in gpus), default=None)
