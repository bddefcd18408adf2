"""Train data parallel with a hand-written all-reduce through one central rank.

All four all-reduces (ring, tree, halving and this one) send 2 (N - 1) times the gradients in total. They differ in
the number of rounds, and in the traffic of the busiest rank. Here all traffic goes through one rank. With ring and
halving, each rank sends 2 (N - 1) / N of the gradients.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu
from zerofit.compare.strategies.parameter_server import gradients, set_gradients


def train(work: BenchmarkTask):
    """Train with gradients that are added up on rank 0."""
    return train_with(work, central)


def train_with(work: BenchmarkTask, all_reduce: Callable[[Tensor, int, int], None]):
    """Train data parallel. `all_reduce` sums all ranks' vectors in place."""
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
    return state_on_cpu(model) if rank == 0 else None


def central(vector: Tensor, rank: int, ranks: int) -> None:
    """Sum all vectors on rank 0, which sends the sum to everybody."""
    # 2 (N - 1) messages go through one rank.
    if rank:
        dist.send(vector, 0)
        dist.recv(vector, 0)
        return
    theirs = torch.empty_like(vector)
    for peer in range(1, ranks):
        dist.recv(theirs, peer)
        vector += theirs
    for peer in range(1, ranks):
        dist.send(vector, peer)
