"""Track the ops of a user's script.

Host tensors are real. Device tensors and parameters are fake. So the script's own data, samplers, tokenizers and
collators run unchanged. Fake copies of integers and masks on the device keep their values, and ops on them are
computed, so that a script takes the right branches.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from types import FrameType
from typing import cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import Work
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from zerofit.simulate.costs.layers import is_kernel
from zerofit.simulate.memory.ledger import DEVICE
from zerofit.simulate.ops import shortcuts
from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, Scratch, leaves_of, uncounted
from zerofit.simulate.ops.tracker import COMPOSED, FUNCTIONAL, is_collective, is_counted
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.value_tracker import HOLDS_NOTHING_BYTES, SIMULATED, ValueTracker
from zerofit.simulate.script.values import KEPT_DATA, alike, forget, known_value

_HOST = torch.device("cpu")
USER_LINE_BYTES = 1 << 20  # storages from this size on have the script's line
_DEVICE_OF = torch.ops.prim.device.default
_VALUE_OF = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_TO_COPY = torch.ops.aten._to_copy.default
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
# products whose gradient depends on whether an element is 0. While a dispatch mode is active, autograd always runs the
# formula for zeros, which needs more memory (autograd/FunctionsManual.cpp: prod_backward, cumprod_backward)
_PRODUCTS = (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int, torch.ops.aten.cumprod.default)
# ops with storages as arguments; the key of a cached result would keep the storages alive
_OF_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "eye")
_NEW = tuple(f"aten::{name}" for name in _FACTORIES)
_IS_PINNED = "aten::is_pinned"
_PINNING = (_IS_PINNED, "aten::_pin_memory")
_SPARSE = ("sparse_coo", "sparse_cs", "sparse_bs", "sparse_compressed", "to_sparse")  # fakes have no indices and values
_PEER_TO_PEER = ("c10d::send", "c10d::recv_")
_CAUGHT = re.compile(r"OutOfMemory|out of memory|should_reduce_batch_size")  # the last one is Accelerate's


# How an op of a script runs:
#
#   inputs                                   runs on        values of the outputs
#   real host tensors only                   the host       real
#   a fake among them                        fakes          computed too, if all inputs are known and the output small
#   none (torch.empty on the device)         fakes          unknown
#   none, a large one on the host            fakes          unknown: the script's memory must stay small
class ScriptTracker(ValueTracker):
    """Runs ops on host tensors for real. Runs ops on device tensors with fakes."""

    supports_higher_order_operators = True
    user_line_bytes = USER_LINE_BYTES

    def __init__(self, device: str, scratch: Scratch, fakes: FakeTensorMode, workspace_bytes: int = 0):
        super().__init__(device, scratch, fakes, workspace_bytes)
        self.without_rule = ""  # the last op without a rule for the shapes of its outputs
        self.ops_on_fakes = 0  # how many have run
        self.local = 0  # number of the rank's GPU
        self.compiles = False  # whether the script has compiled a model or function of its own
        self.widened: list[tuple[int, int]] = []  # float32 copies of 16-bit tensors: index, last dimension
        self.autocast: torch.dtype | None = None  # the type that autocast used in training
        # handle of a send or receive -> its tensors, which it keeps alive (WorkNCCL::outputs_)
        self._held = WeakIdKeyDictionary()
        self.capacity_bytes = math.inf  # of the device, until its memory is exceeded where the script expects this
        self.received: object = []  # weak references to the tensors of the last collective, as it got them

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: OpArguments = (), kwargs: OpKeywords | None = None
    ) -> OpOutput:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if DTensor in types or NestedTensor in types:
            return NotImplemented  # its ops on the local tensor or the flat values arrive here later
        # C++ code asks by this op for a fake's device (FakeTensor.__new__, dispatch_device). It needs the simulated
        # device, not the name that `gpu.device_shown` shows to Python code.
        if func is _DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        args, kwargs = tuple(map(self._placed, args)), {k: self._placed(v) for k, v in kwargs.items()}
        name = func._overloadpacket._qualified_op_name
        self._works = []
        if not name.startswith("profiler::"):
            self.last = (name, self._module)
        if name in _PINNING and self.device == "cuda":
            return self._pinning(name, args[0])
        if _is_composite(func):  # seen only below autograd: in inference mode and in bodies of higher-order ops
            with self:
                return func.decompose(*args, **kwargs)
        if func in COMPOSED:
            with self:
                return func._op_dk(COMPOSED[func], *args, **kwargs)
        if func is _WAIT:  # its rule for shapes would return a copy
            self.wait_for(args[0])
            return args[0]
        pins = self.device == "cuda" and kwargs.get("pin_memory")
        kwargs = {**kwargs, "pin_memory": False} if pins else kwargs  # `pin` below needs no CUDA driver
        leaves = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        faked = any(isinstance(t, FakeTensor) for t in leaves)
        if faked or kwargs.get("device") == SIMULATED or (not leaves and self._holds_nothing(name, args, kwargs)):
            out = self._on_fakes(func, name, args, kwargs, leaves)
        else:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
                if name.startswith(FUNCTIONAL):
                    out = alike(name, args)
                elif name.startswith("c10d::"):  # the fake backend writes no results
                    self._receive(name, args, leaves)
        sends = name.startswith("c10d::")
        if is_collective(name):
            self._note_collective(name, args, out)
            self._works = [Work.unbox(t) for t in leaves_of(out) if isinstance(t, torch._C.ScriptObject)]
            if name in _PEER_TO_PEER:
                self._held[self._works[0]] = args[0]
            self.received = tree_map(lambda t: weakref.ref(t) if isinstance(t, Tensor) else t, args[0])
        if self.streams.issued is not None:
            if is_collective(name):
                self._note_sent(name, args, out)
            elif faked and is_kernel(func):
                self._note_kernel(func, args, kwargs, out)
        written = (out, next(iter(leaves), None)) if faked and (sends or func._schema.is_mutable) else ()
        overwritten = any(map(is_real, written))
        if is_counted(func) and (sends or not overwritten):
            # a fake that replaced a real tensor for this call has no memory of its own
            self._note_storages(name, func, args, kwargs, None if overwritten else out)
            # a script that searches for the largest batch expects the error here
            if self.ledger.live[DEVICE] > self.capacity_bytes:
                self._note_recovery()
        if pins:
            self.pin(out)
        if func is _TO_COPY and faked and out.dtype is torch.float32 and args[0].itemsize == 2:
            index = self._index.get(out.untyped_storage()._cdata)
            self.widened += [(index, out.shape[-1])] if index is not None and out.dim() else []
        return out

    def _higher_order(self, op: HigherOrderOperator, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
        """Run a higher-order op's body op by op, like eager torch.

        Without an eager kernel, use the shape rule. If the script uses torch.compile, flex_attention is one kernel that
        stores no scores (torch/_inductor/kernel/flex).
        """
        rules = cast("Mapping[object, Callable[..., object]]", registered_hop_fake_fns)  # typed with other keys
        run, shapes = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd), rules.get(op)
        if shapes is not None and (run is None or (self.compiles and op in (flex_attention, flex_attention_backward))):
            run = shapes
        if run is None:
            raise NotImplementedError(f"{op.name()} has neither an eager kernel nor a rule for shapes (no fake impl)")
        with self:
            row_sums = args[4].new_empty(args[4].shape) if run is shapes and op is flex_attention_backward else None
            out = run(*args, **kwargs)
            del row_sums  # of the output's gradient, in float32
            return out

    def _placed(self, value: object) -> object:
        """Replace a CUDA device by the simulated device, and "cpu:0" by "cpu"."""
        # Return other values unchanged.
        if not isinstance(value, torch.device):
            return value
        if value.type == "cpu":
            return _HOST
        # torch reads an integer as an index of the simulated device
        if self.device != "cuda" or value.type not in ("cuda", SIMULATED.type) or value == SIMULATED:
            return value
        self.note_gpu(value.index)
        return SIMULATED

    def note_gpu(self, number: int | None) -> None:
        """Add a note if the script places a tensor on a GPU with another number than the rank's."""
        if number not in (None, self.local):
            text = f"tensors on cuda:{number}: counted on cuda:{self.local}, since one GPU per process is simulated"
            self.note(text, bound=True, here=True)

    def _note_recovery(self) -> None:
        """Add a note if the script would catch an out-of-memory error of the GPU here."""
        line = recovers_at()
        if line:
            self.capacity_bytes = math.inf
            self.note(
                f"{line} catches out-of-memory errors, and the script may then go on with less memory; zerofit raises "
                "none and shows what the first attempt needs: start with a smaller batch to simulate a later one"
            )

    def _pinning(self, name: str, tensor: Tensor) -> object:
        """Run `is_pinned` or `pin_memory` without torch's own code, which needs a CUDA driver."""
        if name == _IS_PINNED or self.is_pinned(tensor):
            return self.is_pinned(tensor)
        with self:
            pinned = tensor.clone()
        self.pin(pinned)
        return pinned

    def _holds_nothing(self, name: str, args: OpArguments, kwargs: OpKeywords) -> bool:
        """Return whether a new host tensor should be fake: a large one, or floats of DeepSpeed.

        A tensor that a data loader makes is real, since the model may read which images or pixels are padding.
        """
        if not name.startswith(_NEW) or getattr(kwargs.get("device"), "type", "cpu") != "cpu":
            return False
        # sizes are a list, except for arange and eye; of these, the first number is enough for a bound
        count = math.prod(int(n) for n in next((a for a in args if isinstance(a, (list, tuple))), args[:1]))
        kind = kwargs.get("dtype") or torch.get_default_dtype()
        if count * kind.itemsize >= HOLDS_NOTHING_BYTES:
            return count > KEPT_DATA or not _loads_batch()
        code = self._call_site()[1]
        return kind.is_floating_point and code is not None and "/deepspeed/" in code.co_filename

    def _on_fakes(
        self, func: OpOverload, name: str, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor]
    ) -> OpOutput:
        self.ops_on_fakes += 1
        if any(layout in name for layout in _SPARSE) or any(t.layout is not torch.strided for t in leaves):
            raise not_simulated("a sparse tensor", "use a dense tensor, or sum rows with index_add_ or scatter_add_")
        if func is _VALUE_OF:
            known = self.read(args[0])
            known = self.counted(args[0]) if known is None else known
            if known is None:
                return self._stand_in(func, args)
            with unset_fake_temporarily():
                return known.item()
        if func is _INDEXED[1] and args[2].numel() == 1 and len(args[1]) == 1 and not args[3:]:
            mask = args[1][0]  # a scalar fills a mask without a list of its places (canDispatchToMaskedFill)
            if isinstance(mask, FakeTensor) and mask.dtype == torch.bool and known_value(mask) is None:
                forget(args[0])
                return args[0]
        if forward_ad._current_level >= 0:  # a dispatch mode keeps these formulas from working in place
            self.note("forward-mode gradients (jvp, jacfwd, hessian): an upper bound", bound=True)
        lacking = uncounted(self.device, name, args)
        if lacking:
            self.note(lacking, missing=True)
        if func in _PRODUCTS and args[0].requires_grad and torch.is_grad_enabled():
            self.note(f"gradient of {name}: an upper bound, as if an element were 0", bound=True, here=True)
        # torch also replaces a mask by one list of places per dimension, and these lists need memory
        if func in _INDEXED:
            args = (args[0], [number for i in args[1] for number in self._numbers(i)], *args[2:])
        fake_args, fake_kwargs = args, kwargs
        if leaves and not any(isinstance(t, FakeTensor) for t in leaves):
            # with only real inputs FakeTensorMode would run `real.to(device)` (torch/_subclasses/fake_tensor.py)
            fake_args, fake_kwargs = tree_map(lambda t: self.fakes.from_tensor(t) if is_real(t) else t, (args, kwargs))
        uncached = disable_fake_tensor_cache(self.fakes) if func in _OF_STORAGES else nullcontext()
        try:
            with uncached:
                out = shortcuts.run(func, fake_args, fake_kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            out = self._by_values(func, args, kwargs, leaves, error)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "no fake impl" in str(error):
                self.without_rule = name
            self.failed = error  # if autograd's thread loses it (`fakes.device.register`)
            raise
        self._keep_values(func, name, args, kwargs, leaves, out)
        if func is _TO_COPY and isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
            known = self.read(out)
            return out if known is None else known  # back on the host, where tensors are real
        return out

    def adopt(self, real: Tensor, fake: Tensor) -> None:
        """Move a real tensor's entry in the ledger to the fake that replaces the tensor."""
        storage, taken = real.untyped_storage(), fake.untyped_storage()
        index = self._index.pop(storage._cdata, None)
        if index is None:
            self.track(fake, "parameter")
            return
        # A storage is known by its address, which the next storage may get. So both finalizers delete an entry. At exit
        # they need not run.
        self._index[taken._cdata], self._adopted[storage._cdata] = index, index
        weakref.finalize(taken, self._left, taken._cdata, storage._cdata, index).atexit = False
        weakref.finalize(storage, self._adopted.pop, storage._cdata, None).atexit = False

    def _left(self, address: int, real: int, index: int) -> None:
        """Handle the release of a fake's storage."""
        # If the real tensor still lives, the memory stays in use.
        if self._adopted.pop(real, None) == index == self._index.get(address):
            self._index[real] = self._index.pop(address)
        else:
            self._released(address, index)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage, or of the fake that replaced the storage."""
        super().resized(storage)
        index = self._adopted.get(storage._cdata)
        if index is not None:
            self.ledger.resized(index, storage.nbytes())


def _loads_batch() -> bool:
    """Return whether a DataLoader is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
        frame = frame.f_back
    return frame is not None


def is_real(value: object) -> bool:
    """Return whether this is a tensor with real memory."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def on_simulated(value: object) -> object:
    """Return the simulated device for a CUDA device. Return other values unchanged."""
    return SIMULATED if isinstance(value, torch.device) and value.type == "cuda" else value


@cache
def _is_composite(func: OpOverload) -> bool:
    """Return whether an op only calls other ops.

    Some ops, such as silu_backward, can do so but also have a CPU kernel. For these, return False.
    """
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # raises an error for ops of TorchScript (prim)
    name = func.name()
    return func.namespace != "prim" and kernel(name, "CompositeImplicitAutograd") and not kernel(name, "CPU")


def recovers_at() -> str:
    """Return the "file:line" of a running `try` that handles out-of-memory errors; "" if none."""
    # Autograd may have called from its own thread. Only `frame` refers to frames: a second name would keep this
    # function's own frame alive, and with it the tensors of its callers, until Python collects garbage.
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        file = frame.f_code.co_filename
        for lines in _guarded_lines(file):
            if frame.f_lineno in lines:
                return f"{os.path.relpath(file)}:{lines.start}"
        frame = frame.f_back
    return ""


@cache
def _guarded_lines(file: str) -> tuple[range, ...]:
    text = "".join(linecache.getlines(file))
    if not _CAUGHT.search(text):
        return ()
    return tuple(
        range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Try) and _CAUGHT.search("".join(map(ast.unparse, node.handlers)))
    )
