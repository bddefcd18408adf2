"""Store the values of small device tensors, and decide the values that control flow reads.

Collectives return values as if all other ranks had this rank's values.
The decision follows from known operands, or from the assumption that training continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.simulate.ops.costs import OpArguments, OpOutput
from zerofit.simulate.ops.tracker import collective_of

_aten = torch.ops.aten
_OR = (_aten.bitwise_or, _aten.bitwise_or_, _aten.logical_or, _aten.logical_or_)
_AND = (_aten.bitwise_and, _aten.bitwise_and_, _aten.logical_and, _aten.logical_and_, _aten.mul, _aten.mul_)
_OF_ALL = (_aten.all, _aten.any, _aten.max, _aten.min)
_NOT_FINITE = (_aten.isnan, _aten.isinf)
# Largest number of elements of a device tensor whose values are kept. Integers are tokens, masks and lengths, which
# decide shapes. Scripts branch on few floats, such as a loss or a learning rate.
KEPT_INTEGERS, KEPT_FLOATS = 1 << 20, 64
KEPT_DATA = 1 << 26  # the same for copies of the script's own data, comparisons with them, and a router's choices
_COPIES = (_aten._to_copy, _aten.clone, _aten.cat, _aten.stack, _aten.index, _aten.index_select)
_MOST_EXPERTS = 1024  # a top-k of more choices selects tokens of a vocabulary, or boxes
_EQUAL = {_aten.eq: True, _aten.ne: False}  # whether the op is True for equal operands
_FILLED = {_aten.zeros_like: False, _aten.new_zeros: False, _aten.zeros: False}
_FILLED |= {_aten.ones_like: True, _aten.new_ones: True, _aten.ones: True}
# An integer that the script does not set is 0: it sets sizes one by one, and then reads them. Floats stay unknown.
UNDEFINED = {_aten.empty, _aten.empty_like, _aten.new_empty}
_FILLED |= dict.fromkeys(UNDEFINED, False)
RULES = {*_OR, *_AND, *_OF_ALL, *_NOT_FINITE, *_EQUAL, *_FILLED}
# collectives for which torch has no rule for fakes (torch/distributed/_meta_registrations.py); they return a handle
COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
Result = tuple[Tensor, Tensor | None]  # a tensor that a collective writes, and its new value; None if it is unknown


@contextmanager
def on_host() -> Iterator[None]:
    """Run ops on real tensors, without gradients."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


# `Any`: for a tensor the value is a tensor or None, for other objects it is the object
def known_value(leaf: object) -> Any:
    """Return the known value of a fake; None if unknown.

    Return real tensors and other objects unchanged. Values share memory as the fakes do: an op in place on a view also
    changes the value of its base.
    """
    if not isinstance(leaf, FakeTensor):
        return leaf
    of = leaf.__dict__
    value = of.get("_known")
    return value if value is None or _unknown_writes(leaf) == of["_since"] else None


def keep(fake: FakeTensor, value: Tensor, *, assumed: bool = False) -> None:
    """Store the value of a fake tensor.

    `assumed`: the value follows from an assumption about a router's choices.
    """
    since = _unknown_writes(fake)
    # torch keeps a storage's Python object, with this attribute, as long as the storage lives
    fake.untyped_storage()._unknown_writes = since  # pyright: ignore[reportAttributeAccessIssue]
    vars(fake).update(_known=value, _assumed=assumed, _since=since)  # pyright: ignore[reportAttributeAccessIssue]


def _unknown_writes(fake: FakeTensor) -> int:
    """Return how often the values of all fakes that share a fake's memory were forgotten."""
    return getattr(fake.untyped_storage(), "_unknown_writes", 0)


def is_data(func: OpOverload, leaves: Sequence[Tensor], out: Tensor) -> bool:
    """Return whether `out` only copies or compares data that the script read on the host.

    `leaves`: the op's inputs, whose values are known. `out` must have at most as many elements as one of them. An op
    in place counts as a copy, so that the values of all views stay right.
    """
    # Weights are no data. An expanded tensor (stride 0) has fewer values than elements: a copy would need more memory.
    known = [known_value(t) for t in leaves if not isinstance(t, nn.Parameter)]
    most = max((t.numel() for t in known if t.layout == torch.strided and 0 not in t.stride()), default=0)
    kept = func.is_view or func._schema.is_mutable or func._overloadpacket in _COPIES or out.dtype == torch.bool
    return kept and out.numel() <= min(most, KEPT_DATA)


def overwrite(fake: FakeTensor, value: Tensor, *, assumed: bool = False) -> None:
    """Store the value that an op writes to a fake, also for the fakes that share its memory."""
    known = known_value(fake)
    if known is not None and 0 not in known.stride():  # several elements of an expanded value share memory
        value = known.copy_(value)
    else:
        forget(fake)
        value = value.clone()
    keep(fake, value, assumed=assumed)


def forget(fake: FakeTensor) -> None:
    """Delete the stored value of a fake tensor, and of all fakes that share its memory."""
    of, storage = vars(fake), fake.untyped_storage()
    of.pop("_elements", None)
    of.pop("_known", None)
    if hasattr(storage, "_unknown_writes"):
        storage._unknown_writes += 1  # pyright: ignore[reportAttributeAccessIssue]


def is_assumed(leaf: object) -> bool:
    """Return whether a tensor's known value follows from an assumption about a router's choices."""
    return isinstance(leaf, FakeTensor) and known_value(leaf) is not None and leaf.__dict__["_assumed"]


def choices(several: bool, args: OpArguments, shape: Sequence[int], *, crowded: bool) -> Tensor | None:
    """Return the experts that a router is assumed to choose from unknown scores.

    `args`: the op's arguments, first the scores (..., experts). `shape`: the result's shape. If `crowded`, every token
    chooses the first experts, otherwise all experts get the same number of tokens. Returns None if the shapes are not
    those of a router, e.g. for a choice among the tokens of a vocabulary.
    """
    scores, width = args[0].shape, shape[-1] if several else 1
    dimension = args[2 if several else 1] if len(args) > (2 if several else 1) else -1 if several else None
    of_experts = len(scores) > 1 and 0 < scores[-1] <= _MOST_EXPERTS and dimension in (-1, len(scores) - 1)
    if not of_experts or math.prod(shape) != math.prod(scores[:-1]) * width or math.prod(shape) > KEPT_DATA:
        return None
    # consecutive tokens choose consecutive experts, so the counts of two experts differ by at most one
    if crowded:
        return torch.arange(width).expand(*scores[:-1], width).reshape(*shape).contiguous()
    return torch.arange(math.prod(shape)).reshape(*shape) % scores[-1]


def largest(value: object) -> object:
    """Return real values for a fake: True for a mask; distinct and not 0 for other tensors."""
    if not isinstance(value, FakeTensor) or known_value(value) is not None:
        return value
    with on_host():
        return torch.arange(1, value.numel() + 1).to(value.dtype).reshape(value.shape)


# `done = unknown | (length >= limit)` ends a loop of generation at its own limit only by this logic of three values.
def known_truth(func: OpOverload, args: OpArguments, known: OpArguments) -> bool | None:
    """Return True if an output is all True or 1, False if all False or 0, None if unknown.

    `func`: an op in RULES.

    A known operand can decide alone: True in an `or`, False or zero in an `and` or product. Unknown floats are assumed
    to be finite, as in training that continues. So isnan, isinf, `x != x` and `abs(x) == inf` are False.
    """
    packet = func._overloadpacket
    if packet in _FILLED:
        return _FILLED[packet]
    if packet in _NOT_FINITE:
        return False if known[0] is None else None
    if packet in _EQUAL:
        itself = len(args) > 1 and args[0] is args[1]
        infinite = len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
        unknown = known[0] is None and (itself or infinite)
        return _EQUAL[packet] is itself if unknown else None
    same = [value for value in map(_of_all, known) if value is not None]
    if packet in _OF_ALL:
        return same[0] if len(args) == 1 and same and isinstance(same[0], bool) else None
    if packet in _OR:
        return True if any(value is True for value in same) else None
    return False if any(value == 0 for value in same) else None


def _of_all(value: object) -> bool | float | None:
    """Return the value that all elements share; None if they differ, or are unknown."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, (bool, int, float)) else None
    if not value.numel():
        return None
    first = value[(0,) * value.dim()]
    # an expanded scalar may have the size of all scores: it is not compared element by element
    equal = all(stride == 0 for stride in value.stride()) or bool((value == first).all())
    return first.item() if equal else None


def alike(name: str, args: OpArguments) -> OpOutput:
    """Return a functional collective's result on real tensors, as if all ranks had these values."""
    (op, group), given = collective_of(name, args), args[0]
    assert group is not None
    ranks, rank = group.size(), group.rank()
    reduction = args[1] if isinstance(args[1], str) else ""

    def result(value: Tensor) -> Tensor:
        if op.startswith("allgather_base"):
            return _repeated(value, ranks)
        if op.startswith("reduce_scatter_base"):
            return _reduced(value, reduction, ranks).chunk(ranks)[rank].clone()
        if op == "alltoall_base":
            return _repeated(_part(value, args[2], ranks, rank), ranks)
        return _reduced(value, reduction, ranks).clone()

    return [result(value) for value in given] if isinstance(given, list) else result(given)


def results(name: str, args: OpArguments, reduction: object) -> Iterator[Result]:
    """Yield what a collective of c10d writes, as if all ranks had this rank's values.

    `args`: of the op; known values of fakes are used. `reduction`: of a reduction; the op itself does not contain it.
    """
    (op, group), first = collective_of(name, args), args[0]
    if group is None:
        return
    ranks, rank = group.size(), group.rank()
    if op in ("allreduce", "allreduce_coalesced") or (op == "reduce" and args[3] == rank):
        for t in first:
            value = known_value(t)
            yield t, None if value is None else _reduced(value, reduction, ranks)
    elif op in ("allgather", "gather"):
        for outs, one in zip(first, args[1], strict=False):
            for out in outs:
                yield out, known_value(one)
    elif op in ("reduce_scatter", "scatter"):
        for out, ins in zip(first, args[1] or [[]] * len(first), strict=False):
            value = known_value(ins[rank]) if ins else None  # only the root has the inputs of a scatter
            yield out, value if value is None or op == "scatter" else _reduced(value, reduction, ranks)
    elif op == "alltoall":  # every rank sends its part number `rank`, which equals this rank's own
        for out in first:
            yield out, known_value(args[1][rank])
    elif op.startswith(("allgather_base", "allgather_into_tensor", "reduce_scatter_", "alltoall_base")):
        several = isinstance(first, (list, tuple))
        for out, one in zip(first, args[1], strict=True) if several else ((first, args[1]),):
            value = known_value(one)
            if value is not None and op.startswith("reduce_scatter"):
                value = _reduced(value, reduction, ranks).reshape(ranks, -1)[rank]
            elif value is not None:
                value = _repeated(_part(value, args[4], ranks, rank) if op == "alltoall_base" else value, ranks)
            yield out, value.reshape(out.shape) if value is not None and value.numel() == out.numel() else None
    elif op in ("recv", "recv_any_source"):
        yield from ((t, None) for t in first)


def _repeated(value: Tensor, ranks: int) -> Tensor:
    return value.repeat(ranks, *[1] * (value.dim() - 1))


def _part(value: Tensor, splits: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Return the rows of `value` that go to `rank`.

    `splits`: rows for each rank; [] for equal parts.
    """
    return value.split(list(splits) or value.shape[0] // ranks)[rank] if value.shape[0] else value


def _reduced(value: Tensor, reduction: object, ranks: int) -> Tensor:
    """Return the result of a reduction. A mean or a maximum of equal values changes nothing."""
    if value.dtype == torch.bool:  # the sum of masks is their `or`
        return value
    if reduction in (dist.ReduceOp.SUM, "sum"):
        return value * ranks
    return value**ranks if reduction in (dist.ReduceOp.PRODUCT, "product") else value
