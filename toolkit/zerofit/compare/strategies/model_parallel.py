"""Naive model parallel: each rank keeps some of the layers; activations go on to the next rank, gradients come back.

The whole batch passes through, so that at any moment one rank works and all others wait: it buys memory, not time.
"""

import torch.distributed as dist

from zerofit.compare.benchmark_task import BenchmarkTask
from zerofit.compare.tensor_p2p import gathered, receive, send


def train(work: BenchmarkTask):
    """Train each rank's own layers, from its own point of view."""
    dist.init_process_group(work.backend)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = work.stage(rank, last + 1)
    optimizer = work.optimizer(stage.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        inputs = x if rank == 0 else receive(rank - 1, work.device).requires_grad_()
        output = stage(inputs)
        if rank < last:
            send(output.detach(), rank + 1)
            output.backward(receive(rank + 1, work.device))
        else:
            work.loss(output, y).backward()
        if rank > 0:
            assert inputs.grad is not None  # backward has made it
            send(inputs.grad, rank - 1)
        optimizer.step()
    return gathered(stage.whole_state())
