"""Training with one batch size until the epochs are over: when the target is reached, and how noisy gradients are."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.compare.work import Work

NOISE_EVERY = 8  # steps between measurements of the gradient's noise


def train_to_target(work: Work) -> dict[str, Any]:
    """The curve over the epochs; seconds are those of training, without evaluations."""
    job, model = work.job, work.model()
    optimizer = work.optimizer(model.parameters())
    steps = max(1, work.samples // job.global_batch)
    noise, curve, seconds = Noise(), list[dict[str, Any]](), 0.0
    for epoch in range(job.epochs):
        began = time.perf_counter()
        for step in range(steps):
            done = epoch * steps + step
            x, y = work.batch(done * job.global_batch, job.global_batch)
            optimizer.zero_grad()
            noise.backward(work, model, x, y, measure=done % NOISE_EVERY == 0)
            optimizer.step()
        _wait(work)
        seconds += time.perf_counter() - began
        curve.append({"epoch": epoch + 1, "seconds": seconds, **work.evaluate(model)})
        work.progress(epoch + 1)
    return {"curve": curve, "noise_scale": noise.scale}


def _wait(work: Work) -> None:
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)


class Noise:
    """The simple noise scale: the batch size at which a gradient's noise is as large as the gradient.

    McCandlish, Kaplan, Amodei and others, "An Empirical Model of Large-Batch Training" (2018), appendix A.1: from the
    gradient's squared norm over a whole batch and over its half, both averaged over many steps.
    """

    def __init__(self) -> None:
        self._half, self._whole, self._sizes = list[float](), list[float](), (0, 0)

    def backward(self, work: Work, model: nn.Module, x: Tensor, y: Tensor, measure: bool) -> None:
        """The gradient of the mean loss; in two halves where it is to be measured."""
        half = len(x) // 2
        if not measure or len(x) % 2 or half == 0:
            work.loss(model(x), y).backward()
            return
        (work.loss(model(x[:half]), y[:half]) / 2).backward()
        self._half.append(4 * _squared_norm(model))
        (work.loss(model(x[half:]), y[half:]) / 2).backward()
        self._whole.append(_squared_norm(model))
        self._sizes = (half, len(x))

    @property
    def scale(self) -> float | None:
        """In samples; None where the gradient is lost in the noise, or nothing was measured."""
        if not self._whole:
            return None
        small, large = self._sizes
        of_small, of_large = (sum(values) / len(values) for values in (self._half, self._whole))
        squared = (large * of_large - small * of_small) / (large - small)  # of the true gradient
        spread = (of_small - of_large) / (1 / small - 1 / large)  # trace of the covariance of one sample's
        scale = spread / squared if squared > 0 else math.inf
        return scale if 0 < scale < math.inf else None


def _squared_norm(model: nn.Module) -> float:
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
