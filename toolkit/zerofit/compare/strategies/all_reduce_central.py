"""Data parallel with an all-reduce written by hand, on one central device, through which every byte goes.

Like the ring, the tree and halving it sends 2 (N - 1) times the gradients altogether. They differ in how many rounds
that takes, and in the share of the busiest rank: all of it here, 2 (N - 1) / N of the gradients on a ring and by
halving.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask, whole_state
from zerofit.compare.strategies.parameter_server import gradients, set_gradients


def train(work: BenchmarkTask):
    """Train with gradients that are added up on rank 0."""
    return train_with(work, central)


def train_with(work: BenchmarkTask, all_reduce: Callable[[Tensor, int, int], None]):
    """Train on batches of which each rank reads its own share; `all_reduce` adds up all ranks' vectors in place."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches(rank, ranks):
        model.zero_grad()
        work.loss(model(x), y).backward()
        total = gradients(model).to(work.device)
        all_reduce(total, rank, ranks)
        set_gradients(model, total / ranks)
        optimizer.step()
    return whole_state(model) if rank == 0 else None


def central(vector: Tensor, rank: int, ranks: int) -> None:
    """Add all up on rank 0, which sends everybody the sum: 2 (N - 1) messages through one place."""
    if rank:
        dist.send(vector, 0)
        dist.recv(vector, 0)
        return
    theirs = torch.empty_like(vector)
    for other in range(1, ranks):
        dist.recv(theirs, other)
        vector += theirs
    for other in range(1, ranks):
        dist.send(vector, other)
