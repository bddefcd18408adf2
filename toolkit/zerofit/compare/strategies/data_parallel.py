"""Train data parallel from scratch: scatter the batch, add up gradients, step everywhere."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.compare.benchmark_task import BenchmarkTask, state_on_cpu


def train(work: BenchmarkTask):
    """Train on batches that rank 0 reads and scatters."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = work.model()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        x, y = scattered(x, rank, ranks), scattered(y, rank, ranks)
        work.loss(model(x), y).backward()
        for gradient in gradients(model):
            dist.all_reduce(gradient)
            gradient.div_(ranks)
        optimizer.step()
    return state_on_cpu(model) if rank == 0 else None


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that this step has used."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def scattered(full, rank, ranks):
    """Return this rank's share of rank 0's tensor."""
    shares = list(full.chunk(ranks)) if rank == 0 else None
    share = torch.empty_like(full[: len(full) // ranks])
    dist.scatter(share, shares, src=0)
    return share
