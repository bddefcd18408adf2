"""Record what a script's rank issues in a step: kernels, copies, collectives, and waits."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import Work
from torch.utils.weak import WeakIdKeyDictionary

from zerofit.simulate.costs.kernels import call_of, one_kernel
from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, Scratch, bytes_of, leaves_of
from zerofit.simulate.ops.issued import COPY, HOOKS, HOST_STEP, KERNEL, ON_HOST, STEP, CommunicatingRanks, IssuedWork
from zerofit.simulate.ops.tracker import AllocationTracker, collective_of
from zerofit.simulate.script.errors import not_simulated

_COPIES = ("_to_copy", "copy_")
_IN_PLACE = re.compile("adam|adagrad|lamb|lion")  # in names of DeepSpeed's C++ ops that return no tensor


class IssuingTracker(AllocationTracker):
    """An AllocationTracker that records work in `streams.issued`, unless that is None."""

    def __init__(self, device: str, scratch: Scratch, workspace_bytes: int = 0):
        super().__init__(device, scratch, workspace_bytes)
        self.gpus = 1  # per node
        # handle of a collective, or the result of a functional one -> `on` and `before` of `IssuedLog.wait`
        self._awaited = WeakIdKeyDictionary()
        self._works: list[Work] = []  # handles of the last collective, until its caller gets them

    def _issued(self, kind: str, module: str | None = None) -> IssuedWork:
        stream, module = self.streams.current.number, self._module if module is None else module
        return IssuedWork(kind, stream, self._phase, module, self.streams.now)

    def _note_kernel(self, func: OpOverload, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> None:
        assert self.streams.issued is not None
        copies = func._overloadpacket.__name__ in _COPIES  # copies of real batches count, too
        tensors = [t for t in leaves_of((args, kwargs, out)) if isinstance(t, Tensor if copies else FakeTensor)]
        places = {t.device.type for t in tensors}
        backward = torch._C._current_autograd_node() is not None
        module, inside = self._call_site()[0] if backward else self._module, backward or bool(self._running)
        if copies and len(places) > 1:
            pinned = all(self.is_pinned(t) for t in tensors if t.device.type == "cpu")
            work = self._issued(COPY, module)._replace(bytes=max(t.nbytes for t in tensors), pinned=pinned)
        else:
            kind = KERNEL if self.device in places else ON_HOST
            kernel = one_kernel(call_of(func, args, kwargs, out))
            work = self._issued(kind, module)._replace(kernel=kernel, inside=inside)
        self.streams.issued.items.append(work)

    def _note_sent(self, name: str, args: OpArguments, out: OpOutput) -> None:
        assert self.streams.issued is not None
        op, group = collective_of(name, args)
        if group is None:
            return
        members = dist.get_process_group_ranks(group)
        # at least this rank; the number decides whether the data pass the network
        near = sum(rank // self.gpus == dist.get_rank() // self.gpus for rank in members)
        ranks = CommunicatingRanks(group.group_name, len(members), max(1, near))
        # an all-gather's output or a reduce-scatter's input: the larger side has the data of all ranks
        moved = max(map(bytes_of, (*args, out)), default=0)
        sent = self.streams.issued.send(self._issued(op)._replace(bytes=moved), ranks)
        for handle in self._works or leaves_of(out):  # a functional collective returns no handle but its result
            self._awaited[handle] = sent

    def wait_for(self, handle: object) -> None:
        """Record that the current stream waits for a collective.

        `handle`: the collective's handle, or the result of a functional collective.
        """
        sent = self._awaited.get(handle)
        if self.streams.issued is not None and sent is not None:
            self.streams.issued.wait(self.streams.current.number, *sent)

    def note_hooks(self, parameters: int) -> None:
        """Record that ZeRO-3's hooks gather the parameters of a module."""
        if self.streams.issued is not None and parameters:
            self.streams.issued.items.append(self._issued(HOOKS)._replace(count=parameters))

    def ran(self, name: str, args: object) -> None:
        """Record one of DeepSpeed's C++ ops that ran in place, e.g. Adam on device or host.

        Raises NotSimulated for other ops, e.g. those of the quantizer.
        """
        if not _IN_PLACE.search(name):
            hint = "simulate without the option that needs it, e.g. zero_quantized_weights, for an upper bound"
            raise not_simulated(f"DeepSpeed's CUDA kernel {name}", hint)
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor) and leaf.dim()]
        if self.streams.issued is None or not tensors:
            return
        size = sum(t.nbytes for t in tensors)
        moved = 7 * size // 4 if "adam" in name else 2 * size  # Adam reads 4 tensors and writes 3 (not the gradient)
        kind = STEP if max(tensors, key=lambda t: t.nbytes).device.type == self.device else HOST_STEP
        self.streams.issued.items.append(self._issued(kind)._replace(bytes=moved, inside=False))
