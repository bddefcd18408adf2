"""The learning rate's curve: linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def factor(step: int, *, total: int, warmup: int, schedule: str, floor: float) -> float:
    """Factor on the peak learning rate at a 0-based step; cosine and linear come down to `floor` after the last step.

    The first step already has 1/(warmup + 1) of the peak, and the last is above the floor: a step with learning rate 0
    would be wasted.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * shape


def make_scheduler(optimizer: Optimizer, *, total: int, warmup: int, schedule: str, floor: float) -> LambdaLR:
    """A torch scheduler that DeepSpeed steps after each optimizer step that was not skipped."""
    return LambdaLR(optimizer, lambda step: factor(step, total=total, warmup=warmup, schedule=schedule, floor=floor))
