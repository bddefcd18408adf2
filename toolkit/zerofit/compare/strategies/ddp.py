"""Train with DistributedDataParallel: gradients are added up in buckets while backward runs."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu


def train(work: BenchmarkTask):
    """Train with each rank reading its own share of a batch."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # It divides the sums by the number of ranks. Shares are equally large, so the result is the gradient of the full
    # batch.
    model = DistributedDataParallel(work.model())
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches(rank, ranks):
        optimizer.zero_grad()
        work.loss(model(x), y).backward()
        optimizer.step()
    return state_on_cpu(model.module) if rank == 0 else None
