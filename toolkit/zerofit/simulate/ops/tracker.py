"""Track every op of a simulated rank: its storages, FLOPs and collectives."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence import layer as ulysses_layer
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit import models
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.memory.allocator import RecordStream, replay
from zerofit.simulate.memory.categories import classify
from zerofit.simulate.memory.host import highest, host_moments
from zerofit.simulate.memory.ledger import (
    DEVICE,
    HOST,
    LOCKED,
    PINNED,
    Ledger,
    Storage,
    device_events,
    kind_peaks,
    timeline,
)
from zerofit.simulate.memory.snapshot import AllocationOrigin, StackLog
from zerofit.simulate.ops import shortcuts
from zerofit.simulate.ops.costs import (
    BLAS,
    OpArguments,
    OpKeywords,
    OpOutput,
    Scratch,
    added_to,
    bytes_of,
    flops_of,
    leaves_of,
)
from zerofit.simulate.ops.streams import SimulatedStream, Streams
from zerofit.simulate.record import CollectiveCalls, GroupUse, PhaseFlops, RankPhase, RankRecord
from zerofit.spec.local_machine import is_older
from zerofit.spec.memory_kinds import LOGITS, SAVED, TEMPORARIES, WORKSPACES, is_loss
from zerofit.spec.overhead import CUBLASLT_BYTES, CUBLASLT_SHARES_FROM

_ULYSSES = "deepspeed::dim_zero_all_to_all"
FUNCTIONAL = "_c10d_functional::"  # collectives that return their result, as DTensor's; c10d's names for them
_IN_PLACE = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather_base",
    "reduce_scatter_tensor": "reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "broadcast": "broadcast",
}
# ops whose kernel, the same on all devices, calls other ops (ATen/native: Linear.cpp, LinearAlgebra.cpp, Distance.cpp),
# and the dispatch key of this kernel
COMPOSED = {
    torch.ops.aten._trilinear.default: DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor: DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch.ops.aten.dist.default: DispatchKey.CompositeExplicitAutograd,
}
RESIZING = ("aten::resize_", "aten::set_", "inductor::resize_storage_bytes_")
_SIMULATE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MODELS = os.path.dirname(os.path.abspath(models.__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_PYTHON = os.path.dirname(os.__file__)
# frames that do not show who needs the memory: torch, this package, contextlib, functools ...
_PASSED_OVER = (_TORCH + os.sep, _SIMULATE + os.sep, "<", f"{_PYTHON}/contextlib", f"{_PYTHON}/functools")
# ... and, by the end of their paths, DeepSpeed's wrappers around torch
_BETWEEN = ("deepspeed/utils/nvtx.py", "deepspeed/accelerator/abstract_accelerator.py")
_LT_IS_APART = is_older("torch", CUBLASLT_SHARES_FROM)

CallSite = tuple[str, CodeType | None, int]  # running module, function that calls the op, line


# What happens for each op of the simulated rank:
#   1. run it on fakes: this gives shapes, and storages that have a size but no memory;
#   2. a storage that is new gets an entry in the ledger, with the running module and line of code;
#   3. a finalizer on the storage records its release, when Python frees the last tensor that uses it;
#   4. scratch memory that the kernel needs only while it runs is allocated and freed at once, which may be a peak.
# Storages are known by their address, which is reused after a release. So a finalizer checks that the address still
# belongs to the finalizer's own entry.
class AllocationTracker(TorchDispatchMode):
    """Records the allocations of all ops in the ledger.

    Fake tensors count as memory, meta tensors do not. `device`: type of the simulated device. On "cpu", host and
    device are one. `workspace_bytes`: bytes that torch allocates and keeps for matrix products, per thread and stream.
    """

    user_line_bytes = sys.maxsize  # from this size on, each storage has the user's line, not only at a new peak

    def __init__(self, device: str, scratch: Scratch, workspace_bytes: int = 0):
        super().__init__()
        self.ledger = Ledger()
        self.streams = Streams(self.ledger)
        self._workspace_bytes = workspace_bytes
        self._handles: set[tuple[int, int, int]] = set()  # (thread, stream, bytes) of workspaces
        self.flops: Counter[tuple[str, int]] = Counter()  # (phase, step) -> FLOPs
        # (collective, group size, phase, step) -> its calls and bytes
        self.sent: defaultdict[tuple[str, int, str, int], list[int]] = defaultdict(lambda: [0, 0])
        self.groups: dict[str, tuple[int, set[str]]] = {}  # name of a process group -> its size, its collectives
        self.convolution_bytes = 0  # input, weights and output of the largest convolution
        self.files: Counter[str] = Counter()  # path on NVMe -> bytes
        self.last = ("", "")  # the last op that began, and the module that called it
        self.failed: Exception | None = None  # the last error of an op; autograd's thread may lose it
        self.device = device
        self.stacks: StackLog | None = None  # set to record the stack of each allocation on the device
        self._scratch = scratch
        self._index: dict[int, int] = {}  # address of a live storage -> index in the ledger
        self._adopted: dict[int, int] = {}  # address of a real storage that a fake has replaced -> index in the ledger
        self._phase, self._step = "build", -1
        self._forward_of: dict[int, CallSite] = {}  # autograd sequence number -> where its op was called
        self._last: CallSite = ("", None, 0)  # the last call site seen in backward
        self._names: dict[int, str] = {}  # id of a module -> its name
        self._running: list[str] = []  # names of the running modules, innermost last
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    def live(self) -> int:
        """Return the live bytes on the device."""
        return self.ledger.live[DEVICE]

    def peak(self) -> int:
        """Return the peak of live bytes on the device since the last reset."""
        return self.ledger.peak[DEVICE]

    def reset_peak(self) -> None:
        """Reset the peaks of all places to the bytes that are live now."""
        self.ledger.peak = Counter(self.ledger.live)

    def begin(self, name: str, step: int) -> None:
        """Start a phase."""
        self._phase, self._step = name, step
        self.ledger.begin(name, step)

    def learn_names(self, model: nn.Module) -> None:
        """Store the names of a model's modules, so that the running module can be named."""
        self._names |= {id(module): name for name, module in model.named_modules()}

    def storage_of(self, tensor: Tensor) -> Storage | None:
        """Return the ledger's record of a tensor's storage.

        Return None for meta tensors, and for tensors that were never recorded.
        """
        index = self._index.get(_address(tensor))
        return None if index is None else self.ledger.storages[index]

    def live_storages(self) -> list[Storage]:
        """Return the records of all live storages."""
        return [self.ledger.storages[index] for index in self._index.values()]

    def record(self, phases: list[RankPhase], alloc_conf: str) -> RankRecord:
        """Return the record of the rank, whose run had these phases.

        `alloc_conf`: the options of the caching allocator.
        """
        # Storages get their kind only now, because the owner of an early one, e.g. an optimizer's state, is known late.
        ledger = self.ledger
        for storage in ledger.storages:
            storage.kind = storage.kind or classify(storage)
        moments = host_moments(ledger)
        events, settings = device_events(ledger), read_alloc_conf(alloc_conf)
        origins = None
        if self.stacks is not None:
            origins = tuple(
                AllocationOrigin(s.kind or "", s.phase, s.step, s.module, s.op, s.stack) for s in ledger.storages
            )
        return RankRecord(
            phases=phases,
            peaks=kind_peaks(ledger),
            host=highest(moments),
            host_phases={phase: moment.total_bytes for phase, moment in moments.items()},
            host_moments=moments,
            kept={kind: sum(s.bytes for s in self.live_storages() if s.kind == kind) for kind in SAVED},
            nvme_bytes=sum(self.files.values()),
            reserved_bytes=replay(events, settings=settings, host_ahead=False).peak_reserved_bytes,
            reserved_ahead_bytes=replay(events, settings=settings).peak_reserved_bytes,
            sent=[
                CollectiveCalls(op=op, bytes=size, group_size=ranks, phase=phase, count=count, step=step)
                for (op, ranks, phase, step), (count, size) in self.sent.items()
            ],
            groups=[GroupUse(ranks=ranks, ops=tuple(sorted(ops))) for ranks, ops in self.groups.values()],
            flops=[PhaseFlops(phase=phase, step=step, flops=n) for (phase, step), n in self.flops.items()],
            timeline=timeline(ledger),
            events=events,
            origins=origins,
            convolution_bytes=self.convolution_bytes,
        )

    def tag(self, tensor: object, kind: str) -> None:
        """Set the kind of a tensor's storage, if it has no kind yet.

        Ignore objects that are not tensors, and tensors without memory.
        """
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            storage = self.storage_of(tensor)
            if storage is not None and storage.kind is None:
                storage.kind = kind

    def ran(self, name: str, args: object) -> None:
        """Record the effects of one of DeepSpeed's C++ ops, which work in place.

        Here this does nothing. A subclass may record more.
        """

    def in_own_code(self) -> bool:
        """Return whether the user's own code is running in a module's forward."""
        code, _ = _caller()
        return bool(self._running) and code is not None and is_own(code.co_filename)

    def pin(self, tensor: Tensor, place: str = PINNED) -> None:
        """Record that a tensor's memory is page-locked.

        `place`: PINNED if torch locked it, LOCKED if other code did.
        """
        index = self._index.get(_address(tensor))
        if index is not None and self.ledger.storages[index].place == HOST:
            self.ledger.pinned(index, place)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is page-locked."""
        storage = self.storage_of(tensor)
        return storage is not None and storage.place in (PINNED, LOCKED)

    def record_stream(self, tensor: Tensor, stream: SimulatedStream) -> None:
        """Record that `stream` uses a tensor's memory."""
        index = self._index.get(_address(tensor))
        if index is not None:
            self.ledger.note(RecordStream(storage=index, stream=stream.number))

    @property
    def _module(self) -> str:
        return self._running[-1] if self._running else ""

    def _enter(self, module: nn.Module, _: object) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, _: object, __: object) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: OpArguments = (), kwargs: OpKeywords | None = None
    ) -> OpOutput:
        """Run an op and record its effects."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # only a query, made for every piece of a tensor
        kwargs = kwargs or {}
        name = func._overloadpacket._qualified_op_name
        self.last = (name, self._module)
        if func in COMPOSED:
            with self:
                return func._op_dk(COMPOSED[func], *args, **kwargs)
        out = shortcuts.run(func, args, kwargs)
        if is_collective(name) or name == _ULYSSES:
            self._note_collective(name, args, out)
        if is_counted(func):
            self._note_storages(name, func, args, kwargs, out)
        return out

    def count_flops(self, flops: int) -> None:
        """Add FLOPs to the current phase."""
        self.flops[self._phase, self._step] += flops

    def _note_storages(self, name: str, func: OpOverload, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> None:
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self.count_flops(flops)
        place: CallSite | None = None
        touched = leaves_of(out)
        if name in RESIZING:
            touched = [*touched, *leaves_of(args)]
        older = added_to(func, args, sys._getframe(1).f_back)
        instead = None if older is None else self._index.get(_address(older))
        for tensor in touched:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.layout is torch.strided:
                if place is None and _address(tensor) not in self._index:
                    place = self._call_site()
                self.track(tensor, name, place, instead)
        if place and place[1] is not None and is_loss(place[1].co_filename):
            for leaf in leaves_of(args):  # the inputs of a loss
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self.tag(leaf, LOGITS)
        extra = self._scratch(name, args, kwargs, out)
        if extra:
            self.ledger.freed(self._allocate_beside(name, extra, TEMPORARIES, place))
        if name == "aten::convolution" and out.device.type == self.device:
            self.convolution_bytes = max(self.convolution_bytes, bytes_of((args[:2], out)))
        if self._workspace_bytes and name in BLAS and out.device.type == self.device:
            self._open_handle(name, self._workspace_bytes, place)
            if _LT_IS_APART and name == "aten::addmm" and args[0].dim() == 1:
                self._open_handle(name, CUBLASLT_BYTES, place)
        if self._has_waited(name, args, kwargs, out):
            self.streams.current.synchronize()

    def _open_handle(self, op: str, size: int, place: CallSite | None) -> None:
        """Record a library's workspace, at the first call of each thread on each stream."""
        # aten/src/ATen/cuda/CublasHandlePool.cpp: a handle belongs to a thread, a workspace to a handle and a stream.
        # Autograd runs backward in a thread of its own, which therefore gets a second workspace.
        handle = threading.get_ident(), self.streams.current.number, size
        if handle not in self._handles:
            self._handles.add(handle)
            self._allocate_beside(op, size, WORKSPACES, place)

    def _allocate_beside(self, op: str, size: int, kind: str, place: CallSite | None) -> int:
        module, code, line = place or self._call_site()
        storage = Storage(size, DEVICE, self._phase, self._step, op, module, code, line, kind=kind)
        storage.stream = self.streams.current.number
        return self.ledger.allocated(storage)

    # `item()` needs the value, and a copy between host and device without `non_blocking` returns only when it is done
    # (aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda). Everything else only issues work.
    def _has_waited(self, name: str, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> bool:
        """Return whether the host waited in this op for a value, or a copy from or to the device."""
        if name == "aten::_local_scalar_dense":
            return args[0].device.type == self.device
        if name not in ("aten::_to_copy", "aten::copy_") or not args or not isinstance(out, Tensor):
            return False
        source = args[1 if name == "aten::copy_" else 0]
        blocking = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
        types = {source.device.type, out.device.type}
        return blocking and len(types) == 2 and self.device in types

    def track(self, tensor: Tensor, op: str, place: CallSite | None = None, instead: int | None = None) -> None:
        """Record a tensor's storage if it is new. Record its size if it has changed.

        `instead`: index of a storage. If this storage is released next, the new storage reuses its memory.
        """
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return
        address, size = storage._cdata, storage.nbytes()
        if address in self._index or address in self._adopted:
            self.resized(storage)
            return
        module, code, line = place or self._call_site()
        where = DEVICE if tensor.device.type == self.device else HOST
        again = self._phase == "backward" and bool(self._running)
        noted = Storage(size, where, self._phase, self._step, op, module, code, line, again)
        noted.stream = self.streams.current.number
        if self.stacks is not None and where == DEVICE:
            noted.stack = self.stacks.here(code, line)
        if (where == DEVICE and self.live() + size >= self.peak()) or size >= self.user_line_bytes:
            own = code.co_filename if code is not None and is_own(code.co_filename) else ""
            noted.user_line = f"{_relative(own, os.getcwd())}:{line}" if own else user_line()
        self._watch(storage, self.ledger.allocated(noted, instead))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a known storage."""
        index = self._index.get(storage._cdata)
        if index is not None and self.ledger.storages[index].bytes != storage.nbytes():
            self.ledger.resized(index, storage.nbytes())

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        self._index[storage._cdata] = index
        weakref.finalize(storage, self._released, storage._cdata, index).atexit = False

    def _released(self, address: int, index: int) -> None:
        if self._index.get(address) == index:  # otherwise a new storage has this address
            del self._index[address]
            self.ledger.freed(index)

    def _call_site(self) -> CallSite:
        """Return the running module and the innermost line outside of torch.

        In backward, these are the module and the line of the forward op.
        """
        # In backward no Python frame shows which layer runs. Autograd numbers each op of the forward, and the node
        # of its backward has the next number: so the place that was noted in forward is looked up by number.
        node = torch._C._current_autograd_node()
        code, line = _caller()
        if node is None:
            if code is None:
                return self._last  # autograd itself is adding up gradients
            here = (self._module, code, line)
            number = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage] - none is public
            self._forward_of[number] = here
            return here
        if self._running:  # a checkpoint is being recomputed
            return self._module, code, line
        here = self._forward_of.get(node._sequence_nr() + 1, self._last if code is None else ("", code, line))
        self._last = here
        return here

    # The largest of a collective's tensors is what all ranks have together: the output of an all-gather, the input of a
    # reduce-scatter, either one of an all-reduce.
    def _note_collective(self, name: str, args: OpArguments, out: OpOutput) -> None:
        group: Any  # of torch, or None
        if name == _ULYSSES:  # DeepSpeed's own op (deepspeed/sequence/layer.py), which gets the name of its group
            op, group = "alltoall_base", ulysses_layer._all_to_all_groups[args[1]]  # from DeepSpeed 0.19.7 on
        else:
            op, group = collective_of(name, args)
        ranks = group.size() if group else 1
        sent = self.sent[op, ranks, self._phase, self._step]
        sent[0] += 1
        sent[1] += max(map(bytes_of, (*args, out)), default=0)
        self.groups.setdefault(group.group_name if group else "", (ranks, set()))[1].add(op)


def is_collective(name: str) -> bool:
    """Return whether an op sends data to other ranks."""
    return name.startswith("c10d::") or (name.startswith(FUNCTIONAL) and not name.endswith("::wait_tensor"))


def collective_of(name: str, args: OpArguments) -> tuple[str, dist.ProcessGroup | None]:
    """Return a collective's name in c10d, and its process group (None if it has none)."""
    boxed = next((a for a in args if isinstance(a, torch._C.ScriptObject)), None)
    op = name.partition("::")[2].strip("_")
    if name.startswith(FUNCTIONAL):
        op = next((_IN_PLACE[base] for base in _IN_PLACE if op.startswith(base)), op)
        if boxed is None:
            return op, _resolve_process_group(args[-1])
    return op, None if boxed is None else dist.ProcessGroup.unbox(boxed)


def is_counted(func: OpOverload) -> bool:
    """Return whether an op's output may have its own memory.

    This includes the "view" by which torch.tensor() returns a new tensor.
    """
    return not func.is_view or func is torch.ops.aten.lift_fresh.default


@cache
def is_own(file: str) -> bool:
    """Return whether a file is the user's own: not a library's, Python's or zerofit's."""
    if "site-packages" in file or file.startswith((_PYTHON, "<", os.path.dirname(_SIMULATE), _MODELS)):
        return False
    return not any(file.startswith(folder + os.sep) and _has_packages(folder) for folder in sys.path if folder)


@cache
def _has_packages(folder: str) -> bool:
    """Return whether pip has installed packages into a folder, as `pip install --target` does."""
    return any(Path(folder).glob("*.dist-info"))


def user_line() -> str:
    """Return the innermost running line of the user's code as "file:line".

    In autograd's thread, return the line that waits for autograd.
    """
    found = _innermost_own(sys._getframe(1))
    return found or _innermost_own(sys._current_frames()[threading.main_thread().ident or 0])


def _innermost_own(frame: FrameType | None) -> str:
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{_relative(frame.f_code.co_filename, os.getcwd())}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_relative = cache(os.path.relpath)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _caller() -> tuple[CodeType | None, int]:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PASSED_OVER) and not file.endswith(_BETWEEN):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0
