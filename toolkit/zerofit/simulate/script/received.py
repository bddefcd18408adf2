"""Compute the results of collectives, as if all other ranks had this rank's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.simulate.ops.costs import OpArguments, OpOutput
from zerofit.simulate.ops.tracker import collective_of
from zerofit.simulate.script.values import known_value

# collectives for which torch has no rule for fakes (torch/distributed/_meta_registrations.py); they return a handle
COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
Result = tuple[Tensor, Tensor | None]  # a tensor that a collective writes, and its new value; None if it is unknown


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
    elif op == "alltoall":
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
    if value.dtype == torch.bool:
        return value
    if reduction in (dist.ReduceOp.SUM, "sum"):
        return value * ranks
    return value**ranks if reduction in (dist.ReduceOp.PRODUCT, "product") else value
