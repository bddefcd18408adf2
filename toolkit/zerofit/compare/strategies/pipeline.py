"""Train a pipeline (GPipe): layers on different ranks, and micro batches that keep all busy."""

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError
from zerofit.compare.tensor_p2p import gathered


def train(work: BenchmarkTask):
    """Train with two micro batches per stage."""
    dist.init_process_group(work.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # In the first and last micro batches some ranks are idle (the bubble). Time goes right, F and B are forward and
    # backward of a micro batch, dots are the bubble:
    #
    #     rank 0   F F F F . . B B B B
    #     rank 1   . F F F F B B B B .
    micro_batches = 2 * ranks
    if work.job.global_batch % micro_batches:
        raise NotHereError(f"--global-batch {work.job.global_batch} is not a multiple of {micro_batches} micro batches")
    layers = work.stage(rank, ranks)
    stage = PipelineStage(layers, rank, ranks, work.device)
    # The schedule divides gradients by the number of micro batches (scale_grads), so they are those of the batch's
    # mean.
    schedule = ScheduleGPipe(stage, micro_batches, loss_fn=work.loss)
    optimizer = work.optimizer(layers.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=y)
        else:
            schedule.step()
        optimizer.step()
    return gathered(layers.state_on_cpu())
