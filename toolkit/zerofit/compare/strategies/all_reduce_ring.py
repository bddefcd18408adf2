"""Train data parallel with a hand-written ring all-reduce.

Every rank sends 2 (N - 1) / N of the gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask
from zerofit.compare.strategies.all_reduce_central import train_with


def train(work: BenchmarkTask):
    """Train with gradients that are added up along a ring."""
    return train_with(work, ring)


def ring(vector: Tensor, rank: int, ranks: int) -> None:
    """Add up N parts around the ring, then send the sums around it, in 2 (N - 1) rounds."""
    parts, left, right = vector.tensor_split(ranks), (rank - 1) % ranks, (rank + 1) % ranks
    # In round t rank r sends part r - t and adds what arrives to part r - t - 1. After N - 1 rounds part r + 1 is
    # complete on rank r. In each round all links of the ring are busy, and each carries only 1 / N of the vector.
    for turn in range(ranks - 1):
        part = parts[(rank - turn - 1) % ranks]
        part += exchanged(parts[(rank - turn) % ranks], right, part, left)
    # Then each complete part goes around the ring and replaces the incomplete ones.
    for turn in range(ranks - 1):
        part = parts[(rank - turn) % ranks]
        part.copy_(exchanged(parts[(rank - turn + 1) % ranks], right, part, left))


def exchanged(tensor: Tensor, to: int, like: Tensor, source: int) -> Tensor:
    """Send a tensor to one rank while receiving a tensor of `like`'s shape from another rank."""
    arrived = torch.empty_like(like)
    # As one batch: if all ranks first waited for their sends, no rank would receive.
    both = [dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, arrived, source)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return arrived
