"""Run ops on fakes, with shortcuts where ZeRO repeats ops per rank, and with storages of the real size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, leaves_of
from zerofit.simulate.ops.results import new_fake, repeated

# losses that are stored per element in the tensor that becomes the scalar: its storage keeps that size
# (aten/src/ATen/native/Loss.cpp)
_AS_LONG_AS_ELEMENTS = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_CAT, _CAT_INTO = torch.ops.aten.cat.default, torch.ops.aten.cat.out


def run(func: OpOverload, args: OpArguments, kwargs: OpKeywords) -> OpOutput:
    """Run an op, if possible by a shortcut.

    The output has the same shape, dtype and device in either case.
    """
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
