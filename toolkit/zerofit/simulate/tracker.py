"""Watches every op of a simulated rank: the storages it makes, its FLOPs, its collectives."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import _all_to_all_groups
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit import models
from zerofit.simulate.categories import LOGITS, TEMPORARIES, is_loss
from zerofit.simulate.flops import flops_of
from zerofit.simulate.ledger import DEVICE, HOST, PINNED, Ledger, Storage

_ULYSSES = "deepspeed::dim_zero_all_to_all"
RESIZING = ("aten::resize_", "aten::set_", "inductor::resize_storage_bytes_")
_HERE = os.path.dirname(os.path.abspath(__file__))
_MODELS = os.path.dirname(os.path.abspath(models.__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_PYTHON = os.path.dirname(os.__file__)
# frames that say nothing of who wants memory: torch, this package, contextlib, functools, DeepSpeed's nvtx decorator
_PASSED_OVER = (_TORCH + os.sep, _HERE + os.sep, "<", f"{_PYTHON}/contextlib", f"{_PYTHON}/functools")
_DECORATOR = "deepspeed/utils/nvtx.py"

Scratch = Callable[[str, Any, Any, Any], int]  # (op, args, kwargs, out) -> bytes alive only while the op runs


class AllocationTracker(TorchDispatchMode):
    """Notes in the ledger whatever ops allocate. Works on fake tensors; tensors on meta have no memory.

    `device` is the type of the simulated device; with "cpu", host and device are one.
    """

    def __init__(self, device: str, scratch: Scratch):
        super().__init__()
        self.ledger = Ledger()
        self.flops: Counter[tuple[str, int]] = Counter()  # (phase, step) -> FLOPs
        self.sent: Counter[tuple[str, int, int, str, int]] = Counter()  # (op, bytes, group size, phase, step) -> calls
        self.groups: dict[str, tuple[int, set[str]]] = {}  # name of a process group -> its ranks, its collectives
        self.files: Counter[str] = Counter()  # path on NVMe -> bytes
        self.last = ("", "")  # the op that was begun last, and the module that ran
        self.device = device
        self._scratch = scratch
        self._index: dict[int, int] = {}  # address of a live storage -> its index in the ledger
        self._phase, self._step = "build", -1
        self._forward_of: dict[int, tuple[str, CodeType | None, int]] = {}  # autograd sequence number -> its birthplace
        self._modules = _Modules()
        self._last: tuple[str, CodeType | None, int] = ("", None, 0)  # where backward was last seen

    def live(self) -> int:
        """Live bytes of the device."""
        return self.ledger.live[DEVICE]

    def peak(self) -> int:
        """Most live bytes of the device since the last reset."""
        return self.ledger.peak[DEVICE]

    def reset_peak(self) -> None:
        """Begin to look for a new peak, in every place."""
        self.ledger.peak = Counter(self.ledger.live)

    def begin(self, name: str, step: int) -> None:
        """What follows belongs to this phase."""
        self._phase, self._step = name, step
        self.ledger.begin(name, step)

    def names(self, model: nn.Module) -> None:
        """Learn the names of a model's modules."""
        self._modules.learn(model)

    def storage_of(self, tensor: Tensor) -> Storage | None:
        """What is noted of a tensor's storage; None for one on meta or not seen."""
        index = self._index.get(_address(tensor))
        return None if index is None else self.ledger.storages[index]

    def in_own_code(self) -> bool:
        """Whether a line that is neither a library's nor ours is running, in a module's forward."""
        code, _ = _caller()
        return self._modules.running and code is not None and is_own(code.co_filename)

    def pin(self, tensor: Tensor) -> None:
        """The tensor's memory is page-locked."""
        index = self._index.get(_address(tensor))
        if index is not None and self.ledger.storages[index].place == HOST:
            self.ledger.moved(index, PINNED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and note what it did."""
        kwargs = kwargs or {}
        name = func._overloadpacket._qualified_op_name
        self.last = (name, self._modules.current)
        out = func(*args, **kwargs)
        if name.startswith("c10d::") or name == _ULYSSES:
            self._note_collective(name, args)
        if not func.is_view:
            self._note_storages(name, func, args, kwargs, out)
        return out

    def _note_storages(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self.flops[self._phase, self._step] += flops
        place: tuple[str, CodeType | None, int] | None = None
        touched = tree_leaves(out)
        if name in RESIZING:
            touched = [*touched, *tree_leaves(args)]
        for tensor in touched:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                if place is None and _address(tensor) not in self._index:
                    place = self._whereabouts()
                self.track(tensor, name, place)
        if place and place[1] is not None and is_loss(place[1].co_filename):
            self._note_logits(args)
        extra = self._scratch(name, args, kwargs, out)
        if extra:
            module, code, line = place or self._whereabouts()
            storage = Storage(extra, DEVICE, self._phase, self._step, name, module, code, line, kind=TEMPORARIES)
            self.ledger.died(self.ledger.born(storage))

    def track(self, tensor: Tensor, op: str, place: tuple[str, CodeType | None, int] | None = None) -> None:
        """Note a tensor's storage if it is new, or has another size than when it was noted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return
        address, size = storage._cdata, storage.nbytes()
        index = self._index.get(address)
        if index is not None:
            if self.ledger.storages[index].bytes != size:
                self.ledger.resized(index, size)
            return
        module, code, line = place or self._whereabouts()
        where = DEVICE if tensor.device.type == self.device else HOST
        again = self._phase == "backward" and self._modules.running
        index = self.ledger.born(Storage(size, where, self._phase, self._step, op, module, code, line, again))
        self._index[address] = index
        weakref.finalize(storage, self._released, address, index).atexit = False

    def _note_logits(self, args: Any) -> None:
        """What a loss is computed from is its own."""
        for tensor in tree_leaves(args):
            storage = self.storage_of(tensor) if isinstance(tensor, Tensor) and tensor.is_floating_point() else None
            if storage is not None and storage.kind is None:
                storage.kind = LOGITS

    def _released(self, address: int, index: int) -> None:
        del self._index[address]
        self.ledger.died(index)

    def _whereabouts(self) -> tuple[str, CodeType | None, int]:
        """The module that runs and the innermost line outside of torch; in backward, those of the op's forward."""
        node = torch._C._current_autograd_node()
        code, line = _caller()
        if node is None:
            if code is None:
                return self._last  # autograd itself, adding up gradients
            here = (self._modules.current, code, line)
            number = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage] - none is public
            self._forward_of[number] = here
            return here
        if self._modules.running:  # recomputation of a checkpoint
            return self._modules.current, code, line
        here = self._forward_of.get(node._sequence_nr() + 1, self._last if code is None else ("", code, line))
        self._last = here
        return here

    def _note_collective(self, name: str, args: Any) -> None:
        group: Any
        sizes = [sum(_bytes(t) for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args]
        if name == _ULYSSES:  # an op of DeepSpeed's own (deepspeed/sequence/layer.py), with the name of its group
            name, group = "alltoall_base", _all_to_all_groups[args[1]]
        else:
            group = next((dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch._C.ScriptObject)), None)
        op, ranks = name.removeprefix("c10d::").strip("_"), group.size() if group else 1
        self.sent[op, max(sizes, default=0), ranks, self._phase, self._step] += 1
        self.groups.setdefault(group.group_name if group else "", (ranks, set()))[1].add(op)


class _Modules:
    """Which of a model's modules is running, by hooks on all modules of the process."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: deque[str] = deque()
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    @property
    def running(self) -> bool:
        return bool(self._stack)

    def learn(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        self._stack.pop()


def is_own(file: str) -> bool:
    """Whether a source file is the user's: neither an installed library's, nor Python's, nor ours."""
    return "site-packages" not in file and not file.startswith((_PYTHON, "<", os.path.dirname(_HERE), _MODELS))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _caller() -> tuple[CodeType | None, int]:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PASSED_OVER) and not file.endswith(_DECORATOR):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0
