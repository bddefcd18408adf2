"""Building a model without the memory of a whole one: the constructor runs on fakes, parameters are drawn one by one.

What the constructor does to tensors is noted, op by op, and done again afterwards in the same order, each tensor only
as long as an op needs it. Random numbers are drawn as the constructor would have drawn them, those included that a
later op overwrites, so that the weights are the same to the last bit.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
# these leave nothing of what was in the tensor that they are given
_OVERWRITING = (_aten.fill_, _aten.zero_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.log_normal_, _aten.cauchy_)
_OVERWRITING += (_aten.exponential_, _aten.geometric_, _aten.random_, _aten.bernoulli_)
_REPLACING = (_aten.set_, _aten.resize_, _aten.resize_as_)
_TRUNCATED = "_no_grad_trunc_normal_"  # draws again what lies outside: one op, since how often depends on the numbers


class NotDeferrableError(Exception):
    """A constructor that must have its tensors' values; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How a parameter is kept once it has its values: in which floating type, on which device, and what of it."""

    dtype: torch.dtype
    device: torch.device
    # by name: takes what is kept of a whole parameter, a tensor of its own. Transformers models only
    slices: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # takes a quantised weight as soon as it is made, and leaves a rank's part of it; whole weights are not given to it
    divide: Callable[[nn.Parameter], None] | None = None

    def store(self, tensor: Tensor, name: str = "") -> Tensor:
        """Return the tensor so, itself where it is so already; other than floating types stay what they are."""
        kept = self.slices[name](tensor) if name in self.slices else tensor
        return kept.to(self.device, self.dtype if kept.is_floating_point() else None)


def as_parameter(data: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter; quantised weights are bytes, which have no gradient."""
    return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


def store_parameters(model: nn.Module, stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Store the parameters of a model that was built whole, one after the other; those not to be kept go to meta."""
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if keep is None or name in keep}
    names = {id(p): name for name, p in model.named_parameters()}
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and not old.is_meta:
                data = stored.store(old.data, names[id(old)]) if id(old) in kept else old.data.to("meta")
                new.setdefault(id(old), as_parameter(data, old.requires_grad))
                module._parameters[name] = new[id(old)]
    return model


def build_deferred(make: Callable[[], nn.Module], stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Return what `make` returns, its parameters `stored` as soon as each has its values, buffers on the CPU.

    `keep` names the parameters to hold in memory (None: all); the others are on meta. Beside what is kept, memory is
    needed for one tensor of a constructor at a time.

    Raises NotDeferrableError where `make` needs values, or keeps a tensor where it is not found (a closure); torch's
    random stream then stands where it stood.
    """
    log = _Log()
    with _refusing():
        model = _recorded(make, log)
        with torch.no_grad():
            _replay(log, _slots(model, log, keep), stored)
        log.clear()
    return model


def why_not_deferrable(make: Callable[[], nn.Module]) -> str | None:
    """Return why `build_deferred` would refuse this; None where it would not. Takes no memory and draws nothing."""
    log = _Log()
    try:
        with _refusing():
            slots = _slots(_recorded(make, log), log, None)
            _liveness(log, set(slots))
            for slot in slots.values():
                _put(slot, nn.Parameter(torch.empty(0)))
            del slots, slot
            log.clear()
    except NotDeferrableError as error:
        return str(error)
    return None


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn any error into a NotDeferrableError, before which the random stream is put back where it stood."""
    with _disable_current_modes():
        state = torch.get_rng_state()
    try:
        yield
    except Exception as error:  # anything can fail for want of values; the whole build says what is really wrong
        with _disable_current_modes():
            torch.set_rng_state(state)
        if isinstance(error, NotDeferrableError):
            raise
        raise NotDeferrableError(f"{type(error).__name__}: {error}") from error


def _recorded(make: Callable[[], nn.Module], log: _Log) -> nn.Module:
    """Return a model of fakes; what was done to them is in the log."""
    with _disable_current_modes():
        before = torch.get_rng_state().numpy().tobytes()
        with _recording(log):
            model = make()
        if torch.get_rng_state().numpy().tobytes() != before:
            raise NotDeferrableError(
                "its constructor seeds torch's random stream, or draws from it in a way of its own"
            )
    return model


@dataclass(frozen=True, slots=True)
class _Ref:
    """A fake tensor, as a window of its storage."""

    storage: int
    elements: int  # of the storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Whether each element of the storage is one of the tensor's, and only once."""
        reach = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return not self.offset and torch.Size(self.size).numel() == self.elements and reach == max(1, self.elements)


@dataclass(frozen=True, slots=True)
class _Op:
    """A call that made or changed tensors."""

    func: Callable[..., Any]
    args: Any  # with a _Ref for each tensor
    kwargs: Any
    reads: tuple[_Ref, ...]
    writes: tuple[_Ref, ...]
    draws: bool  # takes numbers from the random stream
    overwrites: bool  # leaves nothing of what was in the tensors that it writes

    def fresh(self) -> set[int]:
        """Return the storages of which nothing is left that was in them before."""
        whole = {ref.storage for ref in self.writes if self.overwrites and ref.whole}
        return whole | ({ref.storage for ref in self.writes} - {ref.storage for ref in self.reads})


def _is_ref(value: Any) -> bool:
    return isinstance(value, _Ref)


class _Log:
    """The ops of a constructor in their order, and the storages that they work on."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # alive, so that their addresses stay theirs

    def ref(self, tensor: Tensor) -> _Ref:
        """Describe a fake tensor."""
        if tensor.device.type != "cpu":
            raise NotDeferrableError(f"its constructor puts a tensor on {tensor.device} itself")
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, storage)
        return _Ref(
            storage._cdata,
            storage.nbytes() // tensor.dtype.itemsize,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def note(self, func: Any, args: Any, kwargs: Any, out: Any, *, draws: bool, overwrites: bool) -> None:
        """Note a call that was made on fakes."""
        args, kwargs = tree_map(lambda t: self.ref(t) if isinstance(t, FakeTensor) else t, (args, kwargs))
        reads = tuple(leaf for leaf in tree_leaves((args, kwargs), _is_ref) if _is_ref(leaf))
        writes = tuple(self.ref(t) for t in tree_leaves(out) if isinstance(t, FakeTensor))
        self.ops.append(_Op(func, args, kwargs, reads, writes, draws, overwrites))

    def clear(self) -> None:
        """Forget all, once the model holds no fakes any more. Raises NotDeferrableError where somebody else does."""
        storages = [weakref.ref(storage) for storage in self.storages.values()]
        self.ops.clear()
        self.storages.clear()
        if any(storage() is not None for storage in storages):
            gc.collect()
        if any(storage() is not None for storage in storages):
            raise NotDeferrableError("it keeps a tensor that is no parameter, buffer or attribute of a module")


@contextmanager
def _recording(log: _Log) -> Iterator[None]:
    """Note in the log whatever is done to tensors, which are fakes."""
    truncated = getattr(nn.init, _TRUNCATED)

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        log.note(truncated, (tensor, *args), kwargs, tensor, draws=True, overwrites=True)
        return tensor

    with warnings.catch_warnings(), _Mode(allow_non_fake_inputs=True), _Recorder(log):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # torch's own deepcopy
        with patch.object(nn.init, _TRUNCATED, draw):
            yield


class _Mode(FakeTensorMode):
    """A mode that stays one where a module is copied: a fake's copy would get a copy of its mode."""

    def __deepcopy__(self, memo: Any) -> _Mode:
        return self


class _Recorder(TorchDispatchMode):
    """Notes each op that makes or changes a fake tensor; views are windows of what is noted already."""

    def __init__(self, log: _Log):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on fakes and note it."""
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is _aten._local_scalar_dense and args[0].constant is None:
            raise NotDeferrableError("its constructor asks for the value of a tensor")
        if packet in _REPLACING:
            raise NotDeferrableError(f"its constructor calls {packet}")
        out = func(*args, **kwargs)
        view = func.is_view and any(isinstance(t, FakeTensor) for t in tree_leaves(args))  # not of Python's numbers
        if not view and any(isinstance(t, FakeTensor) for t in tree_leaves(out)):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._log.note(func, args, kwargs, out, draws=draws, overwrites=packet in _OVERWRITING)
        return out


@dataclass(slots=True)
class _Slot:
    """A fake tensor that the model holds, and every place where it holds it."""

    ref: _Ref
    tensor: Tensor
    places: list[tuple[dict[str, Any], str]]  # a module's parameters, buffers or attributes, and the name there
    kept: bool = False


def _slots(model: nn.Module, log: _Log, keep: set[str] | None) -> dict[int, _Slot]:
    """Return what the model holds, by storage."""
    found: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for place in (module._parameters, module._buffers, vars(module)):
            for name, tensor in place.items():
                if isinstance(tensor, FakeTensor):
                    ref = log.ref(tensor)
                    slot = found.setdefault(ref.storage, _Slot(ref, tensor, []))
                    if slot.tensor is not tensor or nn.parameter.is_lazy(tensor):
                        raise NotDeferrableError(f"{name} is a view of another tensor, or has no shape yet")
                    slot.places.append((place, name))
                    whole_name = f"{prefix}.{name}" if prefix else name
                    slot.kept |= keep is None or whole_name in keep or not isinstance(tensor, nn.Parameter)
    return found


def _replay(log: _Log, slots: dict[int, _Slot], stored: Stored) -> None:
    """Do the ops again and give each slot its tensor after the last op that touches it."""
    needed, last = _liveness(log, {storage for storage, slot in slots.items() if slot.kept})
    for slot in slots.values():
        if not slot.kept:
            _put(slot, nn.Parameter(torch.empty_strided(slot.ref.size, slot.ref.stride, device="meta")))
    real: dict[int, Tensor] = {}
    for number, op in enumerate(log.ops):
        if number not in needed:
            if op.draws:
                _run(op, {})
            continue
        _run(op, real)
        for storage in {ref.storage for ref in op.writes + op.reads}:
            if last[storage] == number and storage in slots and slots[storage].kept:
                _give(slots[storage], real.pop(storage), stored)
            elif last[storage] == number:
                del real[storage]


def _liveness(log: _Log, wanted: set[int]) -> tuple[set[int], dict[int, int]]:
    """Return which ops the wanted storages' values depend on, and for each storage the last of these on it."""
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
        raise NotDeferrableError("its constructor takes a tensor from elsewhere")
    return needed, last


def _run(op: _Op, real: dict[int, Tensor]) -> None:
    """Run an op; storages that it makes or fills are added to the real ones."""

    def window(value: Any) -> Any:
        return _window(real, value) if isinstance(value, _Ref) else value

    args, kwargs = tree_map(window, (op.args, op.kwargs), is_leaf=_is_ref)
    out = op.func(*args, **kwargs)
    for ref, tensor in zip(op.writes, (t for t in tree_leaves(out) if isinstance(t, Tensor)), strict=True):
        real.setdefault(ref.storage, tensor)


def _window(real: dict[int, Tensor], ref: _Ref) -> Tensor:
    """Return what lies at a window of a storage, which is made where it is not there."""
    if ref.storage not in real:
        shape = (ref.size, ref.stride) if ref.whole else ((ref.elements,), (1,))
        real[ref.storage] = torch.empty_strided(*shape, dtype=ref.dtype)
    tensor = real[ref.storage]
    if tensor.dtype != ref.dtype:
        raise NotDeferrableError(f"it looks at {tensor.dtype} as {ref.dtype}")
    same = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()) == (ref.size, ref.stride, ref.offset)
    return tensor if same else tensor.as_strided(ref.size, ref.stride, ref.offset)


def _give(slot: _Slot, tensor: Tensor, stored: Stored) -> None:
    """Put a tensor wherever the fake stands, a parameter as it is to be stored."""
    new = _window({slot.ref.storage: tensor}, slot.ref)
    _put(slot, nn.Parameter(stored.store(new)) if isinstance(slot.tensor, nn.Parameter) else new)


def _put(slot: _Slot, new: Tensor) -> None:
    old = slot.tensor
    if isinstance(old, nn.Parameter):
        new.requires_grad_(old.requires_grad)
    own = set(vars(old)) - set(vars(old.detach())) - {"_is_param"}  # what the constructor has noted on it
    vars(new).update({name: vars(old)[name] for name in own})
    for place, name in slot.places:
        place[name] = new
