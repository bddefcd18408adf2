"""Train data parallel with a hand-written tree all-reduce: full vectors in 2 log2 N rounds."""

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask
from zerofit.compare.strategies.all_reduce_central import train_with


def train(work: BenchmarkTask):
    """Train with gradients that are added up along a tree."""
    return train_with(work, tree)


def tree(vector: Tensor, rank: int, ranks: int) -> None:
    """Add up in pairs, then in pairs of pairs, and send the sum back, in 2 log2 N rounds."""
    # Ranks 0 to 7: first 1 -> 0, 3 -> 2, 5 -> 4, 7 -> 6, then 2 -> 0, 6 -> 4, then 4 -> 0; the sum goes back the same
    # way. Few rounds are good for small vectors, since latency counts most. For large vectors rank 0 is the bottleneck.
    distances = [2**n for n in range((ranks - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(vector, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            theirs = torch.empty_like(vector)
            dist.recv(theirs, rank + distance)
            vector += theirs
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(vector, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            dist.send(vector, rank + distance)
