"""Train naive model parallel: each rank keeps some layers.

Activations go to the next rank, and gradients come back.
The full batch passes through, so at any moment one rank works and the others wait. This saves memory, but no time.
"""

import torch.distributed as dist

from zerofit.compare.benchmark_task import BenchmarkTask
from zerofit.compare.tensor_p2p import gathered, receive, send


def train(work: BenchmarkTask):
    """Train the layers of this rank."""
    dist.init_process_group(work.backend)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = work.stage(rank, last + 1)
    optimizer = work.optimizer(stage.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        # The graph ends at the border of the ranks: the next rank's input is a new leaf, whose gradient is sent back
        # and fed into this rank's backward.
        inputs = x if rank == 0 else receive(rank - 1, work.device).requires_grad_()
        output = stage(inputs)
        if rank < last:
            send(output.detach(), rank + 1)
            output.backward(receive(rank + 1, work.device))
        else:
            work.loss(output, y).backward()
        if rank > 0:
            assert inputs.grad is not None  # set by backward
            send(inputs.grad, rank - 1)
        optimizer.step()
    return gathered(stage.state_on_cpu())
