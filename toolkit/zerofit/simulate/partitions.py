"""Which data parallel rank keeps most at ZeRO 1 and 2: ranks are equal but for what reaches into their partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from zerofit.simulate.record import STEPS, HeavierRank
from zerofit.spec.partitions import reaching


def heavier_than_this(engines: Sequence[Any]) -> HeavierRank | None:
    """Return the rank that keeps the most gradients whole; None where it is this one, or where nothing is divided so.

    A rank keeps those of parameters that lie in its partition in part (stage_1_and_2.py, `params_in_partition`): from
    backward on, but at stage 1 without offload or overlap all ranks have all gradients until the step.
    """
    for engine in engines:
        optimizer = getattr(engine, "optimizer", None)
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            return _heavier(optimizer)
    return None


def _heavier(optimizer: Any) -> HeavierRank | None:
    process_groups = optimizer.real_dp_process_group
    sharing = [dist.get_world_size(group) for group in process_groups]
    widest = max(range(len(sharing)), key=sharing.__getitem__)
    ranks = dist.get_process_group_ranks(process_groups[widest])
    kept = [0] * len(ranks)
    for members, partition, among in zip(
        optimizer.round_robin_bit16_groups, optimizer.partition_size, sharing, strict=True
    ):
        # a float up to DeepSpeed 0.19.6, which divides a padded length with `/`
        for at, place, _ in reaching([p.numel() for p in members], int(partition), len(ranks) // among):
            kept[at] += members[place].numel() * members[place].element_size()
    more = max(kept) - kept[ranks.index(dist.get_rank())]
    in_backward = optimizer.partition_gradients or optimizer.overlap_comm or optimizer.cpu_offload
    phases = STEPS if in_backward else ("step",)
    return HeavierRank(rank=ranks[kept.index(max(kept))], more_bytes=more, phases=phases) if more else None
