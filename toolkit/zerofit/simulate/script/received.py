"""Compute the results of collectives on real tensors, as if all other ranks had this rank's values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.simulate.ops.costs import OpArguments
from zerofit.simulate.ops.tracker import collective_of


def alike(name: str, args: OpArguments) -> Tensor:
    """Return the result of a functional collective on real tensors, as if all ranks had this rank's values."""
    (op, group), value = collective_of(name, args), args[0]
    assert group is not None
    ranks = group.size()
    total = value * ranks if args[1] == "sum" else value.clone()
    if op == "allgather_base":
        return value.repeat(ranks, *[1] * (value.dim() - 1))
    if op == "reduce_scatter_base":
        return total.chunk(ranks)[group.rank()].clone()
    if op == "alltoall_base":
        return value.chunk(ranks)[group.rank()].repeat(ranks, *[1] * (value.dim() - 1))
    return total


def replicate(name: str, args: OpArguments, summed: bool) -> None:
    """Fill the results of a collective on real tensors, as if all ranks had this rank's values.

    `summed`: whether an all-reduce is a sum. A mean or a maximum of equal values changes nothing.
    """
    if name == "c10d::allgather_":
        for outs, one in zip(args[0], args[1], strict=False):
            for out in outs:
                out.copy_(one)
    elif name == "c10d::_allgather_base_":
        flat = args[1].reshape(-1)
        args[0].view(-1).copy_(flat.repeat(args[0].numel() // max(1, flat.numel())))
    elif name == "c10d::alltoall_base_" and not args[3]:  # in equal parts
        group = dist.ProcessGroup.unbox(args[2])
        args[0].copy_(args[1].chunk(group.size())[group.rank()].repeat(group.size(), *[1] * (args[1].dim() - 1)))
    elif name == "c10d::allreduce_" and summed:
        for t in args[0]:
            if t.dtype != torch.bool:
                t.mul_(dist.ProcessGroup.unbox(args[1]).size())
