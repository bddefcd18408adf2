"""Divide a step's samples among ranks by their speeds, measured before the first step."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zerofit.config.shares import shared_out
from zerofit.data import Data, Order
from zerofit.spec.run_folder import Batch, Job
from zerofit.train.engines import ZeroTrainer

# Ranks of different speed finish a step together if rank r gets samples in proportion to its speed:
#
#     samples_r = micro batch x ranks x speed_r / sum of speeds, rounded so that the sum stays the same
#
# The speed is that of forward passes alone; backward takes about twice as long on any device, so the ratio is the
# same.
WARM, PASSES = 2, 8  # uncounted and counted forward passes
MOST_S = 5.0  # limit of the counted passes


@dataclass(frozen=True, kw_only=True)
class RankShares:
    """A batch with a micro batch size for each rank, and the measured speeds of the ranks."""

    batch: Batch
    samples_per_s: tuple[float, ...]  # of each rank, forward

    def __str__(self) -> str:
        speeds = ", ".join(f"{speed:,.3g}" for speed in self.samples_per_s)
        return f"micro batches by rank: {', '.join(map(str, self.batch.shares))} (forward, samples/s: {speeds})"


def measured_shares(job: Job, trainer: ZeroTrainer, data: Data) -> RankShares:
    """Share the samples of the job's batch among ranks in proportion to their measured speeds.

    The result is the same on all ranks. Weights, statistics and random states stay unchanged.
    """
    batch, speed = job.batch, _samples_per_s(job, trainer, data)
    # Each rank adds its own speed to zeros, so the sum has the speeds of all ranks.
    speeds = torch.zeros(batch.dp, dtype=torch.float64, device=trainer.device)
    speeds[trainer.coords.dp_rank] = speed
    dist.all_reduce(speeds)
    samples_per_s = tuple(speeds.tolist())
    shares = shared_out(batch.micro * batch.dp, samples_per_s, batch.limit)
    return RankShares(batch=replace(batch, by_rank=shares), samples_per_s=samples_per_s)


@torch.no_grad()
def _samples_per_s(job: Job, trainer: ZeroTrainer, data: Data) -> float:
    order, positions = Order.of(data.train, job.run.seed), job.batch.positions(0, trainer.coords.dp_rank)
    start, stop = positions.start, positions.stop
    batch = data.train.batch(order.indices(start, stop), order.keys(start, stop))
    trainer.engine.eval()
    dist.barrier()  # all ranks measure at the same time, since the ranks of a host share its cores
    times: list[float] = []
    while len(times) < WARM + PASSES and sum(times[WARM:]) < MOST_S:
        began = time.perf_counter()
        trainer.eval_counts(batch).tolist()  # waits for the device
        times.append(time.perf_counter() - began)
    trainer.engine.train()
    return len(positions) / statistics.median(times[WARM:] or times)
