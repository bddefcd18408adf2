"""Build a model one tensor at a time.

The constructor runs on fake tensors, and its ops are replayed in the same order. Each tensor exists only while an op
needs it. All random numbers are drawn in the constructor's order, even if a later op overwrites them. So the weights
are bitwise identical to those of a normal build.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# How a model is built without memory for all of it:
#
# 1. `_recorded` runs the constructor on fake tensors. `_Recorder` logs each op that makes or changes a tensor.
# 2. `_liveness` goes through the log backwards and finds the ops on which a kept tensor depends. An op that overwrites
#    all of a storage ends the dependence on earlier ops.
# 3. `_replay` runs these ops on real tensors, in order. After the last op on a storage, its tensor is stored (cast,
#    moved, sliced) and the full one is freed.
#
# Ops that only draw random numbers run too: without them, all later draws would get different numbers.

_aten = torch.ops.aten
_Args = tuple[object, ...]  # of an op
_Kwargs = dict[str, object]
# ops that overwrite a tensor completely
_OVERWRITING = (_aten.fill_, _aten.zero_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.log_normal_, _aten.cauchy_)
_OVERWRITING += (_aten.exponential_, _aten.geometric_, _aten.random_, _aten.bernoulli_)
_REPLACING = (_aten.set_, _aten.resize_, _aten.resize_as_)
_TRUNCATED = "_no_grad_trunc_normal_"  # redraws outliers; one op, since the number of draws depends on values


class NotDeferrableError(Exception):
    """Raised with the reason if a constructor cannot run on fake tensors."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How to store a parameter once it has its values: dtype, device, and the part to keep."""

    dtype: torch.dtype
    device: torch.device
    # by name: returns the part to keep of a full parameter, as a new tensor; only for transformers models
    slices: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # reduces a quantized weight, as soon as it is made, to this rank's part; not called for other weights
    divide: Callable[[nn.Parameter], None] | None = None

    def store(self, tensor: Tensor, name: str = "") -> Tensor:
        """Return the tensor cast, moved and cut as requested. Only floating-point tensors are cast."""
        part = self.slices[name](tensor) if name in self.slices else tensor
        return part.to(self.device, self.dtype if part.is_floating_point() else None)


def as_parameter(data: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter with this data. Quantized weights (bytes) never require a gradient."""
    return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


def store_parameters(model: nn.Module, stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Store a built model's parameters one by one. Those that are not in `keep` move to meta."""
    # a tied parameter is kept if any of its names is in `keep`
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if keep is None or name in keep}
    names = {id(p): name for name, p in model.named_parameters()}
    new: dict[int, nn.Parameter] = {}  # by the old parameter's id, so that tied parameters stay tied
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and not old.is_meta:
                data = stored.store(old.data, names[id(old)]) if id(old) in kept else old.data.to("meta")
                new.setdefault(id(old), as_parameter(data, old.requires_grad))
                module._parameters[name] = new[id(old)]
    return model


def build_deferred(make: Callable[[], nn.Module], stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Return the model that `make` builds. Each parameter is `stored` as soon as it has values.

    Buffers are on the CPU. `keep` names the parameters to keep in memory (None: all). Other parameters are on meta.
    Extra memory is needed for only one tensor at a time.

    Raises NotDeferrableError, and restores torch's random state, if `make` needs values or hides a tensor (in a
    closure).
    """
    log = _Log()
    with _refusing():
        model = _recorded(make, log)
        with torch.no_grad():
            _replay(log, _slots(model, log, keep), stored)
        log.clear()
    return model


def why_not_deferrable(make: Callable[[], nn.Module]) -> str | None:
    """Return why `build_deferred` would fail, or None. Needs no memory, draws no numbers."""
    log = _Log()
    try:
        with _refusing():
            slots = _slots(_recorded(make, log), log, None)
            _liveness(log, set(slots))
            # The log is cleared without an error only if nothing refers to the fake tensors.
            for slot in slots.values():
                _put(slot, nn.Parameter(torch.empty(0)))
            del slots, slot
            log.clear()
    except NotDeferrableError as error:
        return str(error)
    return None


@contextmanager
def _refusing() -> Iterator[None]:
    """Restore the random state after an error, and raise a NotDeferrableError."""
    with _disable_current_modes():
        state = torch.get_rng_state()
    try:
        yield
    except Exception as error:  # anything can fail without values; a full build shows a real error
        with _disable_current_modes():
            torch.set_rng_state(state)
        if isinstance(error, NotDeferrableError):
            raise
        raise NotDeferrableError(f"{type(error).__name__}: {error}") from error


def _recorded(make: Callable[[], nn.Module], log: _Log) -> nn.Module:
    with _disable_current_modes():
        before = torch.get_rng_state().numpy().tobytes()
        with _recording(log):
            model = make()
        if torch.get_rng_state().numpy().tobytes() != before:
            raise NotDeferrableError("its constructor seeds torch's generator, or draws from it outside torch's ops")
    return model


@dataclass(frozen=True, slots=True)
class _Ref:
    """A fake tensor's storage, and its type, size, strides and offset in that storage."""

    storage: int
    elements: int  # of the storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def covers_storage(self) -> bool:
        """Whether the tensor has each element of the storage exactly once."""
        reach = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return not self.offset and torch.Size(self.size).numel() == self.elements and reach == max(1, self.elements)


@dataclass(frozen=True, slots=True)
class _Op:
    """A call that created or changed tensors."""

    func: Callable[..., object]
    args: _Args  # with a _Ref for each tensor
    kwargs: _Kwargs
    reads: tuple[_Ref, ...]
    writes: tuple[_Ref, ...]
    draws: bool  # draws random numbers
    overwrites: bool  # does not depend on the previous values of the tensors that it writes

    def fresh(self) -> set[int]:
        """Return the storages whose previous values the op does not need."""
        overwritten = {ref.storage for ref in self.writes if self.overwrites and ref.covers_storage}
        return overwritten | ({ref.storage for ref in self.writes} - {ref.storage for ref in self.reads})


def _is_ref(value: object) -> TypeGuard[_Ref]:
    return isinstance(value, _Ref)


class _Log:
    """The ops of a constructor in order, and their storages."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so addresses are not reused

    def ref(self, tensor: Tensor) -> _Ref:
        if tensor.device.type != "cpu":
            raise NotDeferrableError(f"its constructor puts a tensor on {tensor.device} itself")
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, storage)
        elements, offset = storage.nbytes() // tensor.dtype.itemsize, int(tensor.storage_offset())
        return _Ref(storage._cdata, elements, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def note(
        self, func: Callable[..., object], args: _Args, kwargs: _Kwargs, out: object, *, draws: bool, overwrites: bool
    ) -> None:
        args, kwargs = tree_map(lambda t: self.ref(t) if isinstance(t, FakeTensor) else t, (args, kwargs))
        reads = tuple(leaf for leaf in tree_leaves((args, kwargs), _is_ref) if _is_ref(leaf))
        writes = tuple(self.ref(t) for t in tree_leaves(out) if isinstance(t, FakeTensor))
        self.ops.append(_Op(func, args, kwargs, reads, writes, draws, overwrites))

    def clear(self) -> None:
        """Clear the log. Raises NotDeferrableError if something still refers to a fake tensor."""
        storages = [weakref.ref(storage) for storage in self.storages.values()]
        self.ops.clear()
        self.storages.clear()
        if any(storage() is not None for storage in storages):
            gc.collect()
        if any(storage() is not None for storage in storages):
            raise NotDeferrableError("it keeps a tensor that is not a parameter, buffer or attribute of a module")


@contextmanager
def _recording(log: _Log) -> Iterator[None]:
    truncated = getattr(nn.init, _TRUNCATED)

    def draw(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        log.note(truncated, (tensor, *args), kwargs, tensor, draws=True, overwrites=True)
        return tensor

    with warnings.catch_warnings(), _Mode(allow_non_fake_inputs=True), _Recorder(log):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # from torch's deepcopy
        with patch.object(nn.init, _TRUNCATED, draw):
            yield


class _Mode(FakeTensorMode):
    """A fake mode whose deepcopy is itself, so a copied fake tensor keeps its mode."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Mode:
        return self


class _Recorder(TorchDispatchMode):
    """Records each op that creates or changes a fake tensor, except views."""

    def __init__(self, log: _Log):
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is _aten._local_scalar_dense and cast(FakeTensor, args[0]).constant is None:
            raise NotDeferrableError("its constructor reads the value of a tensor")
        if packet in _REPLACING:
            raise NotDeferrableError(f"its constructor calls {packet}")
        out = func(*args, **kwargs)
        view = func.is_view and any(isinstance(t, FakeTensor) for t in tree_leaves(args))  # not of Python numbers
        if not view and any(isinstance(t, FakeTensor) for t in tree_leaves(out)):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._log.note(func, args, kwargs, out, draws=draws, overwrites=packet in _OVERWRITING)
        return out


@dataclass(slots=True)
class _Slot:
    """A fake tensor of the model, and every module and key where the model has it."""

    ref: _Ref
    tensor: Tensor
    owners: list[tuple[dict[str, Any], str]]  # a module's parameters, buffers or attributes, and the key there
    is_kept: bool = False


def _slots(model: nn.Module, log: _Log, keep: set[str] | None) -> dict[int, _Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for attributes in (module._parameters, module._buffers, vars(module)):
            for name, tensor in attributes.items():
                if isinstance(tensor, FakeTensor):
                    ref = log.ref(tensor)
                    slot = slots.setdefault(ref.storage, _Slot(ref, tensor, []))
                    if slot.tensor is not tensor or nn.parameter.is_lazy(tensor):
                        raise NotDeferrableError(f"{name} is a view of another tensor, or has no shape yet")
                    slot.owners.append((attributes, name))
                    full_name = f"{prefix}.{name}" if prefix else name
                    slot.is_kept |= keep is None or full_name in keep or not isinstance(tensor, nn.Parameter)
    return slots


def _replay(log: _Log, slots: dict[int, _Slot], stored: Stored) -> None:
    """Replay the ops. After the last op on a slot's tensor, put the tensor into the model."""
    needed, last = _liveness(log, {storage for storage, slot in slots.items() if slot.is_kept})
    for slot in slots.values():
        if not slot.is_kept:
            _put(slot, nn.Parameter(torch.empty_strided(slot.ref.size, slot.ref.stride, device="meta")))
    real: dict[int, Tensor] = {}
    for number, op in enumerate(log.ops):
        if number not in needed:
            if op.draws:  # later draws need the generator's state after this one
                _run(op, {})
            continue
        _run(op, real)
        for storage in {ref.storage for ref in op.writes + op.reads}:
            if last[storage] == number and storage in slots and slots[storage].is_kept:
                _store_into_model(slots[storage], real.pop(storage), stored)
            elif last[storage] == number:
                del real[storage]


# A storage is live if a later op reads its values. Example, with `a` kept:
#
#     0  a = empty(4)                 not needed: 2 makes the storage if there is none
#     1  a.normal_()                  not needed, but runs, since it draws
#     2  a.fill_(0)                   needed, and overwrites all of a
def _liveness(log: _Log, wanted: set[int]) -> tuple[set[int], dict[int, int]]:
    """Return the ops on which the `wanted` storages depend, and the last one for each storage."""
    live, needed, last = set(wanted), set(), {}
    for number in range(len(log.ops) - 1, -1, -1):
        op = log.ops[number]
        if not any(ref.storage in live for ref in op.writes):
            continue
        needed.add(number)
        fresh = op.fresh()
        live = (live - fresh) | ({ref.storage for ref in op.reads} - fresh)
        for ref in op.writes + op.reads:
            last.setdefault(ref.storage, number)
    if live:
        raise NotDeferrableError("its constructor uses a tensor from outside")
    return needed, last


def _run(op: _Op, real: dict[int, Tensor]) -> None:
    """Run an op. Add the storages that it creates to `real`."""

    args, kwargs = tree_map(
        lambda value: _window(real, value) if isinstance(value, _Ref) else value, (op.args, op.kwargs), is_leaf=_is_ref
    )
    out = op.func(*args, **kwargs)
    for ref, tensor in zip(op.writes, (t for t in tree_leaves(out) if isinstance(t, Tensor)), strict=True):
        real.setdefault(ref.storage, tensor)


def _window(real: dict[int, Tensor], ref: _Ref) -> Tensor:
    """Return the view of a storage that `ref` describes. Creates the storage if there is none."""
    if ref.storage not in real:
        shape = (ref.size, ref.stride) if ref.covers_storage else ((ref.elements,), (1,))
        real[ref.storage] = torch.empty_strided(*shape, dtype=ref.dtype)
    tensor = real[ref.storage]
    if tensor.dtype != ref.dtype:
        raise NotDeferrableError(f"it views {tensor.dtype} as {ref.dtype}")
    same = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()) == (ref.size, ref.stride, ref.offset)
    return tensor if same else tensor.as_strided(ref.size, ref.stride, ref.offset)


# Takes over the full tensor, which is freed on return.
def _store_into_model(slot: _Slot, tensor: Tensor, stored: Stored) -> None:
    new = _window({slot.ref.storage: tensor}, slot.ref)
    _put(slot, nn.Parameter(stored.store(new)) if isinstance(slot.tensor, nn.Parameter) else new)


def _put(slot: _Slot, new: Tensor) -> None:
    old = slot.tensor
    if isinstance(old, nn.Parameter):
        new.requires_grad_(old.requires_grad)
    added = set(vars(old)) - set(vars(old.detach())) - {"_is_param"}  # attributes that the constructor has set
    vars(new).update({name: vars(old)[name] for name in added})
    for attributes, name in slot.owners:
        attributes[name] = new
