"""The learning rate's curve: linear warm-up, then cosine, linear or constant; and how a resumed run takes it up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def factor(step: int, *, total: int, warmup: int, schedule: str, floor: float) -> float:
    """Return the factor on the peak learning rate at a 0-based step; cosine and linear end at `floor`.

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
    """Return a torch scheduler that DeepSpeed steps after each optimizer step that was not skipped."""
    return LambdaLR(optimizer, lambda step: factor(step, total=total, warmup=warmup, schedule=schedule, floor=floor))


def set_steps_done(scheduler: Any, done: int) -> None:
    """Let a fresh scheduler go on after so many steps."""
    if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, which count from -1
        if done:
            scheduler.step(done - 1)
    elif isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = done, done + 1
        set_rates(scheduler)
    else:
        for _ in range(done):
            scheduler.step()


def set_rates(scheduler: LambdaLR) -> None:
    """Give the optimizer the learning rates that the scheduler's own curve has at its present step."""
    curves = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * curve(scheduler.last_epoch) for base, curve in curves]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
    scheduler._last_lr = rates
