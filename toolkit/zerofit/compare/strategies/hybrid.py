"""Train with hybrid parallelism: a pair of ranks shares one model, pairs divide the batch."""

import torch.distributed as dist

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError
from zerofit.compare.strategies.data_parallel import gradients
from zerofit.compare.tensor_p2p import gathered, receive, send

STAGES = 2


def train(work: BenchmarkTask):
    """Train model parallel within a pair, and data parallel across pairs."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % STAGES:
        raise NotHereError(f"needs an even number of ranks, not {ranks}")
    pair, number, pairs = rank // STAGES, rank % STAGES, ranks // STAGES
    # Each rank creates all groups, in the same order, as new_group requires.
    peers = [dist.new_group(list(range(n, ranks, STAGES))) for n in range(STAGES)][number]
    assert not isinstance(peers, int)  # an int means a group without this rank
    stage = work.stage(number, STAGES)
    optimizer = work.optimizer(stage.parameters())
    for x, y in work.batches(pair, pairs):
        optimizer.zero_grad()
        if number == 0:
            output = stage(x)
            send(output.detach(), rank + 1)
            output.backward(receive(rank + 1, work.device))
        else:
            inputs = receive(rank - 1, work.device).requires_grad_()
            work.loss(stage(inputs), y).backward()
            assert inputs.grad is not None  # set by backward
            send(inputs.grad, rank - 1)
        # Average with the ranks that have the same layers in other pairs.
        for gradient in gradients(stage):
            dist.all_reduce(gradient, group=peers)
            gradient.div_(pairs)
        optimizer.step()
    return gathered(stage.state_on_cpu())
