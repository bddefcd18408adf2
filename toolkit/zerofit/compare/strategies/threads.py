"""Train data parallel in threads of one process: torch.nn.DataParallel for CPU cores.

torch releases the interpreter's lock while it computes, so kernels of threads run in parallel. Python code between
kernels does not.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
from torch import Tensor, nn

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, state_on_cpu


def train(work: BenchmarkTask):
    """Train one replica per thread, each on its share of the batch.

    The first replica sums gradients, steps, and copies its weights to the other replicas.
    """
    if work.device.type != "cpu":
        raise NotHereError("this strategy is for the cores of a CPU; on GPUs torch.nn.DataParallel does the same")
    model, ranks = work.model(), work.job.ranks
    optimizer, replicas = work.optimizer(model.parameters()), [model, *(deepcopy(model) for _ in range(ranks - 1))]

    def share(replica: nn.Module, x: Tensor, y: Tensor) -> None:
        replica.zero_grad()
        # Divided here, the sum of all replicas' gradients is the gradient of the batch's mean loss.
        (work.loss(replica(x), y) / ranks).backward()

    with ThreadPoolExecutor(ranks) as pool:
        for x, y in work.batches():
            list(pool.map(share, replicas, x.chunk(ranks), y.chunk(ranks)))
            for together in zip(*(replica.parameters() for replica in replicas), strict=True):
                _add_up(together)
            optimizer.step()
            with torch.no_grad():
                for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                    for other in others:
                        other.copy_(first)
    return state_on_cpu(model)


def _add_up(together: Sequence[Tensor]) -> None:
    """Store the sum of all replicas' gradients in the first replica."""
    first, *others = (parameter.grad for parameter in together)
    for gradient in others:
        if first is not None and gradient is not None:
            first += gradient
