"""Track the ops of a user's script: host tensors are real; device tensors and parameters are fake.

So the script's own data, samplers, tokenizers and collators run unchanged. Fake copies of integers and masks on the
device keep their values, and ops on them are computed. So a script takes the right branches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.distributed_c10d import Work
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from zerofit.simulate.costs.kernels import call_of, one_kernel
from zerofit.simulate.costs.layers import is_kernel
from zerofit.simulate.ops import shortcuts
from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, Scratch, bytes_of, leaves_of
from zerofit.simulate.ops.issued import COPY, HOOKS, HOST_STEP, KERNEL, ON_HOST, STEP, CommunicatingRanks, IssuedWork
from zerofit.simulate.ops.tracker import (
    FUNCTIONAL,
    AllocationTracker,
    collective_of,
    is_collective,
    is_counted,
    is_own,
    own_line,
)
from zerofit.simulate.record import STEPS
from zerofit.simulate.script.received import alike, replicate
from zerofit.simulate.script.values import RULES, choices, decided, forget, is_assumed, keep, known_value, largest

SIMULATED = torch.device("privateuseone", 0)  # the device as torch's C++ code sees it
_HOST = torch.device("cpu")
KEPT_INTEGERS, KEPT_FLOATS = 1 << 20, 64  # largest number of elements of a device tensor whose values are kept
OWN_LINE_BYTES = 1 << 20  # storages from this size on have the script's line
HOLDS_NOTHING_BYTES = 16 << 20  # new host tensors of at least this size are fake
_DEVICE_OF = torch.ops.prim.device.default
_VALUE_OF = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_TO_COPY = torch.ops.aten._to_copy.default
_HISTC = torch.ops.aten.histc.default
_TOP_K = torch.ops.aten.topk.default
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_BOUNDED = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "torchvision::nms",  # its largest output: all boxes
)
# ops with storages as arguments; the key of a cached result would keep the storages alive
_OF_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "eye")
_NEW = tuple(f"aten::{name}" for name in _FACTORIES)
_COPIES = ("_to_copy", "copy_")
_IS_PINNED = "aten::is_pinned"
_PINNING = (_IS_PINNED, "aten::_pin_memory")
_FILLED = ("c10d::_allgather_base_", "c10d::alltoall_base_")  # output and input are two tensors
_PEER_TO_PEER = ("c10d::send", "c10d::recv_")
_UNDEFINED = ("aten::empty", "aten::new_empty")


# How an op of a script runs:
#
#   inputs                                   runs on        values of the outputs
#   real host tensors only                   the host       real
#   a fake among them                        fakes          computed too, if all inputs are known and the output small
#   none (torch.empty on the device)         fakes          unknown
#   none, a large one on the host            fakes          unknown: the script's memory must stay small
#
# "Known" values are stored with a fake (`keep`). With them, masks, lengths and counters control the script as
# on the real machine. If an op overwrites a tensor with unknown values, its known values are deleted (`forget`).
class ScriptTracker(AllocationTracker):
    """Run ops on host tensors for real, and ops on device tensors on fakes."""

    supports_higher_order_operators = True
    own_line_bytes = OWN_LINE_BYTES

    def __init__(self, device: str, scratch: Scratch, fakes: FakeTensorMode, workspace_bytes: int = 0):
        super().__init__(device, scratch, workspace_bytes)
        self.fakes = fakes
        self.notes: Counter[str] = Counter()  # each approximation, and how often it was used
        self.inexact: set[str] = set()  # the notes that make the figures an upper bound
        self.without_rule = ""  # the last op without a rule for the shapes of its outputs
        self.failed: RuntimeError | None = None  # error of a gradient's accumulation, in autograd's thread
        self.ops_on_fakes = 0  # how many have run
        self.compiles = False  # whether the script has compiled a model or function of its own
        self.gpus = 1  # per node
        self.all_true = False  # whether masks of unknown values count as all True without a note
        self.crowded = False  # whether all tokens choose the same experts; else all experts get as many tokens
        self.routed = False  # whether the script has read which tokens an expert gets
        self.widened: list[tuple[int, int]] = []  # float32 copies of 16-bit tensors: index, last dimension
        self.autocast: torch.dtype | None = None  # the type that autocast used in training
        # handle of a send or receive -> its tensors, which it keeps alive (WorkNCCL::outputs_)
        self._held = WeakIdKeyDictionary()
        # handle of a collective, or the result of a functional one -> its name in the log of issued work
        self._awaited = WeakIdKeyDictionary()
        self._works: list[Work] = []  # of the last collective, until its caller has them
        self.received: Any = []  # weak references to the tensors of the last collective
        self.reduction: Any = dist.ReduceOp.SUM  # of the last all-reduce; the op itself does not contain it

    def note(self, text: str, *, bound: bool = False, here: bool = False) -> None:
        """Count an approximation. `bound`: it makes the figures an upper bound; `here`: add the script's line."""
        line = own_line() if here else ""  # "" if no line of the script is running
        text = f"{text}, at {line}" if line else text
        self.notes[text] += 1
        if bound:
            self.inexact.add(text)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: OpArguments = (), kwargs: OpKeywords | None = None
    ) -> OpOutput:
        """Run the op for real or on fakes, and record its effects."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if DTensor in types or NestedTensor in types:
            return NotImplemented  # its ops on the local tensor or the flat values arrive here later
        if func is _DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        args, kwargs = tuple(map(self._placed, args)), {k: self._placed(v) for k, v in kwargs.items()}
        name = func._overloadpacket._qualified_op_name
        self.last, self._works = (name, self._module), []
        if name in _PINNING and self.device == "cuda":
            return self._pinning(name, args[0])
        if _is_composite(func):  # seen only below autograd: in inference mode and in bodies of higher-order ops
            with self:
                return func.decompose(*args, **kwargs)
        if func is _WAIT:  # its rule for shapes would return a copy
            self.wait_for(args[0])
            return args[0]
        pins = self.device == "cuda" and kwargs.get("pin_memory")
        kwargs = {**kwargs, "pin_memory": False} if pins else kwargs
        leaves = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        faked = any(isinstance(t, FakeTensor) for t in leaves)
        if faked or kwargs.get("device") == SIMULATED or (not leaves and self._holds_nothing(name, args, kwargs)):
            out = self._on_fakes(func, name, args, kwargs, leaves)
        else:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
                if name.startswith(FUNCTIONAL):
                    out = alike(name, args)
                elif name.startswith("c10d::"):
                    replicate(name, args, self.reduction == dist.ReduceOp.SUM)
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
        if pins:
            self.pin(out)
        if func is _TO_COPY and faked and out.dtype is torch.float32 and args[0].itemsize == 2:
            index = self._index.get(out.untyped_storage()._cdata)
            self.widened += [(index, out.shape[-1])] if index is not None and out.dim() else []
        return out

    def _higher_order(self, op: HigherOrderOperator, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
        """Run the ops of a higher-order op's body like torch's eager kernel; without such a kernel, use its shape rule.

        If the script compiles, attention is one kernel that stores no scores (torch/_inductor/kernel/flex).
        """
        rules: Any = registered_hop_fake_fns  # its type names another kind of key
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
        """Replace a CUDA device by the simulated one, and "cpu:0" by "cpu"; return anything else unchanged."""
        if isinstance(value, torch.device) and value.type == "cpu":
            return _HOST
        return on_simulated(value) if self.device == "cuda" else value

    def _pinning(self, name: str, tensor: Tensor) -> object:
        """Return whether a tensor is pinned, or a pinned copy; torch's own code would need a CUDA driver."""
        if name == _IS_PINNED or self.is_pinned(tensor):
            return self.is_pinned(tensor)
        with self:
            pinned = tensor.clone()
        self.pin(pinned)
        return pinned

    def _issued(self, kind: str, module: str | None = None, **more: Any) -> IssuedWork:
        """Return a record of work issued now on the current stream."""
        stream, module = self.streams.current.number, self._module if module is None else module
        return IssuedWork(kind, stream, self._phase, module, self.streams.now, **more)

    def _note_kernel(self, func: OpOverload, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> None:
        """Record what an op launches: a kernel, a copy between host and device, or work on the host."""
        assert self.streams.issued is not None
        copies = func._overloadpacket.__name__ in _COPIES  # copies of real batches count, too
        tensors = [t for t in leaves_of((args, kwargs, out)) if isinstance(t, Tensor if copies else FakeTensor)]
        places = {t.device.type for t in tensors}
        backward = torch._C._current_autograd_node() is not None
        module, inside = self._call_site()[0] if backward else self._module, backward or bool(self._running)
        if copies and len(places) > 1:
            pinned = all(self.is_pinned(t) for t in tensors if t.device.type == "cpu")
            work = self._issued(COPY, module, bytes=max(t.nbytes for t in tensors), pinned=pinned)
        else:
            kind = KERNEL if self.device in places else ON_HOST
            work = self._issued(kind, module, kernel=one_kernel(call_of(func, args, kwargs, out)), inside=inside)
        self.streams.issued.items.append(work)

    def _note_sent(self, name: str, args: OpArguments, out: OpOutput) -> None:
        """Record a collective and the handles that wait for it."""
        assert self.streams.issued is not None
        op, group = collective_of(name, args)
        if group is None:
            return
        members = dist.get_process_group_ranks(group)
        near = sum(rank // self.gpus == dist.get_rank() // self.gpus for rank in members)
        ranks = CommunicatingRanks(group.group_name, len(members), max(1, near))
        number = object()
        for handle in self._works or leaves_of(out):  # a functional collective returns no handle but its result
            self._awaited[handle] = number
        moved = max(map(bytes_of, (*args, out)), default=0)
        self.streams.issued.send(self._issued(op, bytes=moved), ranks, [number])

    def wait_for(self, handle: object) -> None:
        """Record that the current stream waits for a collective.

        `handle`: the collective's handle, or the result of a functional collective.
        """
        number = self._awaited.get(handle)
        if self.streams.issued is not None and number is not None:
            self.streams.issued.wait_for(number, self.streams.current.number)

    def note_hooks(self, parameters: int) -> None:
        """Record that ZeRO-3's hooks gather the parameters of a module."""
        if self.streams.issued is not None and parameters:
            self.streams.issued.items.append(self._issued(HOOKS, count=parameters))

    def ran(self, name: str, args: object) -> None:
        """Record that one of DeepSpeed's C++ ops ran in place, such as Adam on the device or on the host."""
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor) and leaf.dim()]
        if self.streams.issued is None or not tensors:
            return
        size = sum(t.nbytes for t in tensors)
        moved = 7 * size // 4 if "adam" in name else 2 * size  # Adam reads 4 tensors and writes 3 (not the gradient)
        kind = STEP if max(tensors, key=lambda one: one.nbytes).device.type == self.device else HOST_STEP
        self.streams.issued.items.append(self._issued(kind, bytes=moved, inside=False))

    def _holds_nothing(self, name: str, args: OpArguments, kwargs: OpKeywords) -> bool:
        """Return whether a new host tensor should be fake: a large one, or floats that DeepSpeed allocates itself."""
        if not name.startswith(_NEW) or getattr(kwargs.get("device"), "type", "cpu") != "cpu":
            return False
        count = 1
        for n in next((a for a in args if isinstance(a, (list, tuple))), args[:1]):
            count *= int(n)
        kind = kwargs.get("dtype") or torch.get_default_dtype()
        if count * kind.itemsize >= HOLDS_NOTHING_BYTES:
            return True
        code = self._call_site()[1]
        return kind.is_floating_point and code is not None and "/deepspeed/" in code.co_filename

    def _on_fakes(
        self, func: OpOverload, name: str, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor]
    ) -> OpOutput:
        self.ops_on_fakes += 1
        if func is _VALUE_OF:
            known = self.read(args[0])
            if known is None:
                return self._stand_in(func, args)
            with unset_fake_temporarily():
                return known.item()
        if func is _INDEXED[1] and args[2].numel() == 1 and len(args[1]) == 1 and not args[3:]:
            mask = args[1][0]  # a scalar fills a mask without a list of its places (canDispatchToMaskedFill)
            if isinstance(mask, FakeTensor) and mask.dtype == torch.bool and known_value(mask) is None:
                forget(args[0])
                return args[0]
        if func in _INDEXED:
            args = (args[0], [number for i in args[1] for number in self._numbers(i)], *args[2:])
        taken, named = args, kwargs
        if leaves and not any(isinstance(t, FakeTensor) for t in leaves):
            # with only real inputs FakeTensorMode would run `real.to(device)` (torch/_subclasses/fake_tensor.py)
            taken, named = tree_map(lambda t: self.fakes.from_tensor(t) if is_real(t) else t, (args, kwargs))
        keyed = disable_fake_tensor_cache(self.fakes) if func in _OF_STORAGES else nullcontext()
        try:
            with keyed:
                out = shortcuts.run(func, taken, named)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            out = self._by_values(func, args, kwargs, leaves, error)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "no fake impl" in str(error):
                self.without_rule = name
            if name != "aten::add_" or leaves[0].numel() or not leaves[-1].numel():
                raise
            # torch's engine crashes if it cannot accumulate a gradient. `FaultLog.watch` raises the error later
            self.failed, out = error, args[0]
        self._keep_values(func, name, args, kwargs, leaves, out)
        if func is _TO_COPY and isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
            known = self.read(out)
            return out if known is None else known  # back on the host, where tensors are real
        return out

    def read(self, tensor: Tensor) -> Any:
        """Return a tensor's value, or None if it is unknown. Call it if a shape or the control flow depends on it."""
        if is_assumed(tensor) and not self.routed:
            self.routed = True
            share = "all tokens choose the same experts" if self.crowded else "all experts get equally many tokens"
            self.note(f"tokens choose experts by values on the device: {share}", here=True)
        return known_value(tensor)

    def _stand_in(self, func: OpOverload, args: OpArguments) -> object:
        """Return a harmless value instead of a value that only a GPU could compute.

        Add a note if the script's own code reads it.
        """
        value = func(*args)
        code = self._call_site()[1]
        if code is not None and is_own(code.co_filename):
            self.note(f"the value of a tensor on the device: taken as {value}", here=True)
        return value

    def _numbers(self, index: object) -> Sequence[object]:
        """Return the indices where a mask is True, one tensor per dimension.

        A mask of unknown values counts as all True.
        """
        if not isinstance(index, Tensor) or index.dtype != torch.bool:
            return [index]
        known = self.read(index)
        with unset_fake_temporarily():
            if known is None:
                if not self.all_true:
                    self.note("a mask of unknown values as an index: taken as all True", bound=True, here=True)
                known = torch.ones(index.shape, dtype=torch.bool)
            found = known.nonzero()
            columns = [found[:, d].contiguous() for d in range(index.dim())]
        on_device = [self.fakes.from_tensor(column).to(index.device) for column in columns]
        if known_value(index) is not None:  # also a mask in host memory, where tensors are real
            for fake, column in zip(on_device, columns, strict=True):
                if isinstance(fake, FakeTensor):
                    keep(fake, column)
        return on_device

    def _by_values(
        self, func: OpOverload, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor], error: Exception
    ) -> OpOutput:
        """Return the output of an op whose shape depends on values. Raises `error` if the values are unknown.

        For some ops the largest output is a bound. It is the output for a mask that is all True, or for distinct
        elements.
        """
        known = all(self.read(t) is not None for t in leaves)
        if not known:
            if (
                func._overloadpacket._qualified_op_name not in _BOUNDED
                or max(t.numel() for t in leaves) > HOLDS_NOTHING_BYTES
            ):
                raise error
            self.note(f"{func._overloadpacket} of unknown values: taken as its largest output", bound=True, here=True)
            args, kwargs = tree_map(largest, (args, kwargs))
        real = _computed(func, args, kwargs)
        where = next((t.device for t in leaves if isinstance(t, FakeTensor)), torch.device("cpu"))

        def faked(t: object) -> object:
            if not isinstance(t, Tensor):
                return t
            made = torch.empty(t.shape, dtype=t.dtype, device=where)
            made = made if isinstance(made, FakeTensor) else self.fakes.from_tensor(made)
            if known:
                keep(made, t, assumed=any(map(is_assumed, leaves)))
            return made

        return tree_map(faked, real)

    def _keep_values(
        self, func: OpOverload, name: str, args: OpArguments, kwargs: OpKeywords, leaves: list[Tensor], out: OpOutput
    ) -> None:
        """Compute the values of small outputs from known inputs.

        Values that an op overwrites with unknown values are forgotten.
        """
        outs = [t for t in leaves_of(out) if isinstance(t, FakeTensor)]
        if name in _FILLED and isinstance(args[0], FakeTensor) and known_value(args[1]) is not None:
            with unset_fake_temporarily(), _disable_current_modes():
                filled = torch.zeros(args[0].shape, dtype=args[0].dtype)
                replicate(name, (filled, known_value(args[1]), *args[2:]), self.reduction == dist.ReduceOp.SUM)
            keep(args[0], filled, assumed=is_assumed(args[1]))
            return
        routes = func is _TOP_K and self._phase in STEPS  # during generation, top-k chooses tokens
        if routes and known_value(args[0]) is None and out[1].numel() <= KEPT_INTEGERS:
            with unset_fake_temporarily(), _disable_current_modes():
                chosen = choices(out[1].shape, args[0].shape, crowded=self.crowded)
            if chosen is not None:
                keep(out[1], chosen, assumed=True)
                return
        if len(outs) == 1 and self._keep_decided(func, args, outs[0]):
            return
        small = all(t.numel() <= (KEPT_FLOATS if t.is_floating_point() else KEPT_INTEGERS) for t in outs)
        drawn = name.startswith(_UNDEFINED) or torch.Tag.nondeterministic_seeded in func.tags
        if not outs or not small or drawn or any(known_value(t) is None for t in leaves):
            if func._schema.is_mutable:
                for t in outs:
                    forget(t)
            return
        try:
            if name.startswith(FUNCTIONAL):
                with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
                    real = alike(name, tree_map(known_value, args))
            elif name.startswith("c10d::"):
                with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
                    replicate(name, tree_map(known_value, args), self.reduction == dist.ReduceOp.SUM)
                return
            else:
                real = _computed(func, args, kwargs)
        except Exception:  # the host has no kernel for it, so its values are unknown
            for t in outs:
                forget(t)
            return
        for t, value in zip(leaves_of(out), leaves_of(real), strict=True):
            if isinstance(t, FakeTensor) and isinstance(value, Tensor) and value.shape == t.shape:
                keep(t, value, assumed=any(map(is_assumed, leaves)))

    def _keep_decided(self, func: OpOverload, args: OpArguments, out: FakeTensor) -> bool:
        """Keep the value of all elements of an output, if it does not depend on unknown values."""
        if func._overloadpacket not in RULES:
            return False
        with unset_fake_temporarily(), _disable_current_modes():
            value = decided(func, args, tuple(map(known_value, args[:2])))
            if value is None or (out.numel() > KEPT_FLOATS and out.is_floating_point()):
                return False
            whole = torch.tensor(value, dtype=out.dtype).expand(out.shape)
            keep(out, whole.clone() if out.numel() <= KEPT_INTEGERS else whole)
        return True

    def in_own_code(self) -> bool:
        """Return False: a script's own modules also get an assumed value, with a note."""
        return False

    def adopt(self, real: Tensor, fake: Tensor) -> None:
        """Give a real tensor's entry in the ledger to the fake that replaces it."""
        storage, taken = real.untyped_storage(), fake.untyped_storage()
        index = self._index.pop(storage._cdata, None)
        if index is None:
            self.track(fake, "parameter")
            return
        self._index[taken._cdata], self._adopted[storage._cdata] = index, index
        weakref.finalize(taken, self._left, taken._cdata, storage._cdata, index).atexit = False
        weakref.finalize(storage, self._adopted.pop, storage._cdata, None).atexit = False

    def _left(self, address: int, real: int, index: int) -> None:
        """Handle the release of a fake's storage: if the real tensor still lives, the memory stays in use."""
        if self._adopted.pop(real, None) == index == self._index.get(address):
            self._index[real] = self._index.pop(address)
        else:
            self._released(address, index)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage, or of the fake that replaced it."""
        super().resized(storage)
        index = self._adopted.get(storage._cdata)
        if index is not None:
            self.ledger.resized(index, storage.nbytes())


def is_real(value: object) -> bool:
    """Return whether this is a tensor with real memory."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def on_simulated(value: object) -> object:
    """Return the simulated device for a CUDA device; anything else unchanged."""
    return SIMULATED if isinstance(value, torch.device) and value.type == "cuda" else value


@cache
def _is_composite(func: OpOverload) -> bool:
    """Return whether an op only calls other ops. silu_backward, for example, also has kernels."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return func.namespace != "prim" and kernel(name, "CompositeImplicitAutograd") and not kernel(name, "CPU")


def _computed(func: OpOverload, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
    """Run an op on the host with the known values of its arguments."""
    host = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") == SIMULATED else kwargs
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        if func is _HISTC:  # the host has no kernel for integers
            return func(known_value(args[0]).double(), *args[1:], **host).to(args[0].dtype)
        return func(*tree_map(known_value, args), **tree_map(known_value, host))
