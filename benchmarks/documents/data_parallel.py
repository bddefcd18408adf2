"""Simulate torch.nn.DataParallel on several GPUs: the memory of each GPU, and the bytes copied between GPUs.

torch's own code runs on fakes (torch/nn/parallel/data_parallel.py, replicate.py, _functions.py, comm.py). C++ sees one
device. Python sees the device that a tensor would have, and an op runs on the device of its inputs. zerofit replaces
only the copies between devices (torch/csrc/cuda/comm.cpp) and the threads. Here the threads run one after the other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.models.inputs import ImageInputs
from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput

GPUS = 2
STEPS = 2  # the first allocates the optimizer's states


@dataclass(frozen=True, kw_only=True)
class DataParallelCosts:
    """Costs of one step on each GPU in bytes; the first GPU has the optimizer."""

    peak: tuple[int, ...]  # of tensors, without kernels' workspaces
    sent: tuple[int, ...]  # to other GPUs
    received: tuple[int, ...]


# In every step DataParallel copies the model to each GPU, splits the batch, and adds up all gradients on the first GPU.
# So the first GPU has the optimizer, all outputs and the highest peak.
class DeviceMemory(TorchDispatchMode):
    """Track live and peak bytes of each device.

    An op's outputs are on the device of its inputs. Without inputs, they are on the first device.
    """

    def __init__(self, devices: int):
        super().__init__()
        self.live, self.peak = [0] * devices, [0] * devices
        self.sent, self.received = [0] * devices, [0] * devices
        self._places: dict[int, int] = {}  # address of a storage -> its device
        self._target: int | None = None  # destination of the copy in progress
        self.is_inside = False  # whether an op runs; then tensors report the device that C++ sees

    def device_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's device."""
        return self._places.get(tensor.untyped_storage()._cdata, 0)

    def copy(self, tensor: Tensor, device: int) -> Tensor:
        """Return a copy of a tensor on a device, or the tensor itself if it is already on that device."""
        source = self.device_of(tensor)
        if source == device:
            return tensor
        self.send(tensor, device)
        self._target = device
        made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._target = None
        return made

    def send(self, tensor: Tensor, device: int) -> None:
        """Count the bytes of a tensor that goes to another device."""
        size = tensor.numel() * tensor.element_size()
        self.sent[self.device_of(tensor)] += size
        self.received[device] += size

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: OpArguments = (), kwargs: OpKeywords | None = None
    ) -> OpOutput:
        """Run the op and record its allocations."""
        self.is_inside = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.is_inside = False
        if not func.is_view:
            inputs = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            device = next(map(self.device_of, inputs), 0) if self._target is None else self._target
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._note(tensor.untyped_storage(), device)
        return out

    def _note(self, storage: torch.UntypedStorage, device: int) -> None:
        """Record that a new storage is on a device, and later its release."""
        address, size = storage._cdata, storage.nbytes()
        if address not in self._places:
            self._places[address] = device
            self.live[device] += size
            self.peak[device] = max(self.peak[device], self.live[device])
            weakref.finalize(storage, self._free, address, size).atexit = False

    def _free(self, address: int, size: int) -> None:
        self.live[self._places.pop(address)] -= size


def data_parallel_costs(build: Callable[[], nn.Module], inputs: ImageInputs, batch: int) -> DataParallelCosts:
    """Return the costs of a step of SGD with momentum on each of two GPUs.

    The script puts the batch and the model on the first GPU, as in torch's documentation.
    """
    memory = DeviceMemory(GPUS)
    with FakeTensorMode(allow_non_fake_inputs=True), memory, as_devices(memory):
        model = nn.DataParallel(build(), device_ids=list(range(GPUS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        for _ in range(STEPS):
            memory.peak, memory.sent, memory.received = list(memory.live), [0] * GPUS, [0] * GPUS
            x, y = torch.empty(batch, inputs.channels, inputs.size, inputs.size), torch.empty(batch, dtype=torch.long)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return DataParallelCosts(peak=tuple(memory.peak), sent=tuple(memory.sent), received=tuple(memory.received))


@contextmanager
def as_devices(memory: DeviceMemory) -> Iterator[None]:
    """Make the devices visible to torch's DataParallel, and copy between them without a driver."""

    def scatter(
        tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: object
    ) -> list[Tensor]:
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return [memory.copy(part, device) for part, device in zip(parts, devices, strict=False)]

    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], buffer_bytes: int) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in devices[1:]]
        for chunk in _take_tensors(tensors, buffer_bytes):  # each chunk has one dtype
            flat = _flatten_dense_tensors(chunk)
            for device, copies in zip(devices[1:], found, strict=True):
                copies += _unflatten_dense_tensors(memory.copy(flat, device), chunk)
        return [list(tensors), *(list(_reorder_tensors_as(copies, tensors)) for copies in found)]

    def gather(tensors: Sequence[Tensor], dim: int, device: int) -> Tensor:
        for tensor in tensors:
            if memory.device_of(tensor) != device:
                memory.send(tensor, device)
        return torch.cat(sorted(tensors, key=lambda tensor: memory.device_of(tensor) != device), dim)

    def reduce_add(tensors: Sequence[Tensor], device: int) -> Tensor:
        """Add up into the result in place, as NCCL does. (comm.py, reduce_add)"""
        (root,) = (tensor for tensor in tensors if memory.device_of(tensor) == device)
        for tensor in tensors:
            if tensor is not root:
                memory.send(tensor, device)
        return torch.empty_like(root)

    def one_after_the_other(
        replicas: Sequence[nn.Module],
        inputs: Sequence[Sequence[object]],
        options: Sequence[Mapping[str, object]],
        devices: object,
    ) -> list[object]:
        return [replica(*args, **kwargs) for replica, args, kwargs in zip(replicas, inputs, options, strict=True)]

    seen: Any = FakeTensor.device

    def shown(tensor: FakeTensor) -> torch.device:
        return seen.fget(tensor) if memory.is_inside else torch.device("cuda", memory.device_of(tensor))

    data_parallel = sys.modules[nn.DataParallel.__module__]  # the package's attribute of this name is a function
    with ExitStack() as patches:
        for place, name, new in (
            (FakeTensor, "device", property(shown)),
            (FakeTensor, "get_device", lambda tensor: memory.device_of(tensor)),
            (torch._C, "_scatter", scatter),
            (torch._C, "_broadcast_coalesced", broadcast),
            (torch._C, "_gather", gather),
            (comm, "reduce_add", reduce_add),
            (data_parallel, "_get_available_device_type", lambda: "cuda"),
            (data_parallel, "_check_balance", lambda devices: None),
            (data_parallel, "parallel_apply", one_after_the_other),
        ):
            patches.enter_context(patch.object(place, name, new))
        yield
