"""Run ops on fakes, with shortcuts where ZeRO repeats ops per rank, and with storages of the real size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, leaves_of

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_META = torch.device("meta")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_descriptor = vars(torch._C.TensorBase)["layout"]  # FakeTensor's own property takes 1 us
_layout: Callable[[Tensor], torch.layout] = _descriptor.__get__
_empty_strided = torch.empty_strided  # scripts and DeepSpeed may replace torch's constructors
# losses that are stored per element in the tensor that becomes the scalar: its storage keeps that size
# (aten/src/ATen/native/Loss.cpp)
_AS_LONG_AS_ELEMENTS = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}
_ATEN = torch.ops.aten
_CHOOSING = ("Max", "Min", "Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode")
# op -> its variant in place, and autograd's nodes that call this variant unless a dispatch mode is active
# (autograd/FunctionsManual.cpp, areAnyTensorSubclassLike)
_IN_PLACE: dict[OpOverload, tuple[OpOverload, tuple[str, ...]]] = {
    _ATEN.scatter_add.default: (_ATEN.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    _ATEN.scatter.src: (_ATEN.scatter_.src, _CHOOSING),
    _ATEN.index_add.default: (_ATEN.index_add_.default, ("IndexSelect",)),
    _ATEN.index_put.default: (_ATEN.index_put_.default, ("Index",)),
    _ATEN.put.default: (_ATEN.put_.default, ("Take",)),
    _ATEN.masked_fill.Scalar: (_ATEN.masked_fill_.Scalar, ("Maximum", "Minimum")),
    _ATEN.sub.Tensor: (_ATEN.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _ATEN.mul.Tensor: (_ATEN.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
}
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_CAT, _CAT_INTO = torch.ops.aten.cat.default, torch.ops.aten.cat.out


class _OpArgument(NamedTuple):
    """A cached result: the op changes the argument with index `place`, and returns it."""

    place: int


class _New(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_Result = _OpArgument | _New | int | None
_known: dict[tuple[object, ...], _Result | tuple[_Result, ...]] = {}
_entries: dict[torch.device, dict[str, object]] = {}  # attributes (`vars`) of a new fake on each device


# FakeTensorMode decides which results may be cached (torch/_subclasses/fake_tensor.py, `_validate_cache_key` and
# others). It counts each op that it does not put into its own cache (`cache_bypasses`). Its keys also contain offsets
# and sizes of storages. Only views depend on them, and `shortcuts.run` handles views.
#
#   key      op, default dtype, inference mode, then for each tensor: shape, strides, dtype, device, gradient, bits
#   entry    what to make (`_New`), or which argument the op returns (`_OpArgument`)
def repeated(func: OpOverload, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
    """Run an op on fakes, or return the cached result for equal shapes, dtypes and devices."""
    mode = torch._C._get_dispatch_mode(_FAKE)
    key: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if mode is None or not mode.cache_enabled or func.is_view:
        return func(*args, **kwargs)
    if not _add(key, args, mode) or (kwargs and not _add(key, [*kwargs, *kwargs.values()], mode)):
        return func(*args, **kwargs)
    found = tuple(key)
    if found in _known:
        return _again(_known[found], args, mode)
    refused = sum(FakeTensorMode.cache_bypasses.values())
    out = func(*args, **kwargs)
    made = [leaf for leaf in leaves_of(out) if not any(leaf is arg for arg in args)]
    if sum(FakeTensorMode.cache_bypasses.values()) == refused and all(map(_is_plain, made)):
        _known[found] = tuple(_result(part, args) for part in out) if isinstance(out, tuple) else _result(out, args)
    return out


def new_fake(mode: FakeTensorMode, elem: Tensor, device: torch.device) -> FakeTensor:
    """Return a fake of the meta tensor `elem`."""
    # FakeTensor(...) would check its arguments slowly. All new fakes of a device have equal attributes, so a copy of
    # the first one's is enough.
    entries = _entries.get(device)
    if entries is None or entries["fake_mode"] is not mode:
        made = FakeTensor(mode, elem, device)
        _entries[device] = dict(vars(made))
        return made
    made = Tensor._make_subclass(
        FakeTensor, elem, elem.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    vars(made).update(entries)  # pyright: ignore[reportAttributeAccessIssue] - it is a dictionary
    return made


def _add(key: list[object], values: Sequence[object], mode: FakeTensorMode) -> bool:
    """Add the properties of arguments to a cache key. Return whether they decide the output."""
    key.append(len(values))
    for value in values:
        if type(value) is FakeTensor:
            entries = vars(value)
            if entries["constant"] is not None or entries["fake_mode"] is not mode:
                return False
            if entries.get("dispatch_keys") is not None or _layout(value) is not torch.strided:
                return False
            device = entries["_fake_device"] if "_fake_device" in entries else entries["fake_device"]
            key += (value.shape, value.stride(), value.dtype, device)
            key += (value.requires_grad, value.is_conj(), value.is_neg())
        elif type(value) in _PLAIN:
            key += (type(value), value)  # 1 and 1.0 are equal
        elif type(value) is list or type(value) is tuple:
            if not _add(key, value, mode):
                return False
        else:
            return False
    return True


# A larger storage has a second owner or a second use, which a copy would lack. A conjugate or negative bit delays a
# copy until the values are needed, and `_New` has no such bit.
def _is_plain(out: object) -> bool:
    """Return whether `_New` describes an output: a compact storage, without conjugate and negative bit."""
    if not isinstance(out, FakeTensor):
        return out is None or type(out) is int
    with torch._C._DisableTorchDispatch():
        alike = _empty_strided(out.shape, out.stride(), dtype=out.dtype, device=_META)
    compact = out.untyped_storage().nbytes() == alike.untyped_storage().nbytes()
    return compact and not out.is_conj() and not out.is_neg()


def _result(out: OpOutput, args: OpArguments) -> _Result:
    if not isinstance(out, FakeTensor):
        return out
    place = next((n for n, arg in enumerate(args) if arg is out), None)
    return _New(out.shape, out.stride(), out.dtype, out.fake_device) if place is None else _OpArgument(place)


def _again(result: _Result | tuple[_Result, ...], args: OpArguments, mode: FakeTensorMode) -> OpOutput:
    if isinstance(result, _New):
        with torch._C._DisableTorchDispatch():
            elem = _empty_strided(result.shape, result.stride, dtype=result.dtype, device=_META)
        return new_fake(mode, elem, result.device)
    if isinstance(result, _OpArgument):
        return args[result.place]
    return tuple(_again(part, args, mode) for part in result) if isinstance(result, tuple) else result


def run(func: OpOverload, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
    """Run an op, if possible by a shortcut.

    The output has the same shape, dtype and device in either case.
    """
    func = _as_on_device(func, args)
    if (func.is_view or func is _UNSAFE_VIEW) and _is_unknown(args[0]):
        base = args[0]
        with in_kernel_invocation_manager(base.fake_mode):
            views = func(*args, **kwargs)  # on meta tensors, without FakeTensorMode's checks
        if isinstance(views, Tensor):
            return new_fake(base.fake_mode, views, base.fake_device)
        return [new_fake(base.fake_mode, view, base.fake_device) for view in views]
    if func.namespace == "c10d":
        tensors = [value for value in leaves_of(args) if isinstance(value, FakeTensor)]
        if tensors and all(_is_unknown(leaf) for leaf in leaves_of(args) if isinstance(leaf, Tensor)):
            with in_kernel_invocation_manager(tensors[0].fake_mode):
                return func(*args, **kwargs)  # torch/distributed/_meta_registrations.py: its own arguments
    if func is _CAT and args[1:] in ((), (0,), (-1,)) and not kwargs and _are_rows_alike(list(args[0])):
        return args[0][0].new_empty(_length(args[0]))
    if func is _CAT_INTO and _are_rows_alike([whole := kwargs["out"], *args[0]]) and len(whole) == _length(args[0]):
        return whole  # FakeTensorMode caches no op that writes into `out`
    return as_stored(func, args, repeated(func, args, kwargs))


def _as_on_device(func: OpOverload, args: OpArguments) -> OpOverload:
    """Return the op that autograd would call on the real machine."""
    in_place, names = _IN_PLACE.get(func, (func, ()))
    node = torch._C._current_autograd_node() if names else None
    if node is None or node.name().partition("Backward")[0] not in names:
        return func
    # only the product of a loss's weights and targets, before any difference, is a new tensor
    begun = cast("dict[object, bool]", node.metadata)  # torch types this attribute as a method
    if func is _ATEN.mul.Tensor and _as_on_device not in begun:
        return func
    begun[_as_on_device] = True
    return in_place


def as_stored(func: OpOverload, args: OpArguments, out: OpOutput) -> OpOutput:
    """Return an op's output, with a storage as large as in a real run."""
    if func in _AS_LONG_AS_ELEMENTS and not out.dim() and (out.is_meta or isinstance(out, FakeTensor)):
        return out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).resize_(())
    return out


# ZeRO-3 splits gathered parameters and gradients into one piece per rank, and joins the pieces again. For many ranks
# this is slow, since torch needs half a millisecond per op (deepspeed/runtime/zero/partition_parameters.py:791,
# runtime/comm/coalesced_collectives.py:96). Pieces of equal size differ only in their offset, which no size depends on:
#
#   gathered   | rank 0 | rank 1 | ... | rank 511 |        one fake for all 512 pieces
def sharing_pieces(function: Callable[..., object], cut: str) -> Callable[..., object]:
    """Wrap a function that cuts tensors, and uses the pieces only to join them.

    Pieces of the same size from one storage share a fake. `cut`: the method of torch.Tensor that cuts, "narrow" or
    "__getitem__" with a slice.
    """

    def run_sharing(*args: object, **kwargs: object) -> object:
        pieces: dict[tuple[int, int], Tensor] = {}
        original = getattr(Tensor, cut)

        def piece(tensor: Tensor, *where: Any) -> Tensor:  # (dimension, start, length), or a slice
            size = where[-1] if cut == "narrow" else len(range(*where[0].indices(len(tensor))))
            key = tensor.untyped_storage()._cdata, size
            if key not in pieces:
                pieces[key] = original(tensor, *where)
            return pieces[key]

        with patch.object(Tensor, cut, piece):
            return function(*args, **kwargs)

    return run_sharing


def _is_unknown(value: object) -> bool:
    return type(value) is FakeTensor and value.constant is None


def _length(rows: list[Tensor]) -> int:
    return sum(map(len, rows))


def _are_rows_alike(pieces: list[FakeTensor]) -> bool:
    first = pieces[0]
    return all(
        _is_unknown(piece)
        and piece.dim() == 1
        and piece.dtype == first.dtype
        and piece.fake_device == first.fake_device
        for piece in pieces
    )
