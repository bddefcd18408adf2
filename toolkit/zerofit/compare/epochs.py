"""Train for full epochs: accuracy and time after each epoch, and the noise of the gradient."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerofit.compare.job import RankReport
from zerofit.models.batch_norm import batch_norms

if TYPE_CHECKING:
    from zerofit.compare.benchmark_task import BenchmarkTask

NOISE_EVERY = 8  # steps between measurements of the gradient's noise


class Epochs:
    """The epochs of one process. The first rank evaluates after each epoch, which is not timed."""

    def __init__(self) -> None:
        self._noise = Noise()
        self._curve: list[dict[str, object]] = []

    def batches(
        self, work: BenchmarkTask, model: nn.Module, optimizer: torch.optim.Optimizer, share: int, of: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of one of `of` equal shares of every batch, phase by phase."""
        seconds, step, start, epoch = 0.0, 0, 0, 0
        epochs = sum(count for count, _, _ in work.job.phases)
        for count, batch, lr in work.job.phases:
            optimizer.param_groups[0]["lr"] = lr
            for _ in range(count):
                epoch += 1
                # An epoch ends with the step that completes it. The number of samples therefore exceeds full epochs by
                # less than one batch, at any batch size.
                while start < epoch * work.samples:
                    x, y = work.batch(start + share * (batch // of), batch // of)
                    measured = of == 1 and step % NOISE_EVERY == 0
                    if measured:
                        self._noise.of_half(work, model, x, y)
                    began = _now(work)
                    yield x, y
                    seconds += _now(work) - began
                    if measured:
                        self._noise.of_whole(model)
                    start, step = start + batch, step + 1
                    work.progress(f"epoch {epoch} of {epochs}, step {step}")
                if work.rank == 0:
                    progress = {"epoch": epoch, "steps": step, "samples": start, "seconds": seconds}
                    self._curve.append({**progress, **self._scores(work, model)})

    def _scores(self, work: BenchmarkTask, model: nn.Module) -> dict[str, float | None]:
        """Return loss and accuracy on the validation samples, and a test accuracy."""
        # Every second validation sample is reserved for the test accuracy, which must not influence the choice of an
        # epoch or a batch size.
        count = work.eval_samples
        test = work.evaluate(model, range(1, count, 2))["accuracy"] if count > 1 else None
        return {**work.evaluate(model, range(0, count, 2)), "test_accuracy": test}

    def measurements(self) -> RankReport:
        """Return the figures after each epoch and the noise scale; {} on all ranks but the first."""
        return {"curve": self._curve, "noise_scale": self._noise.scale} if self._curve else {}


def _now(work: BenchmarkTask) -> float:
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter()


class Noise:
    """The simple noise scale: the batch size at which a gradient's noise equals the gradient.

    It is computed from the gradient's squared norms over a full batch and over half a batch. Both norms are averaged
    over many steps. The source is McCandlish, Kaplan, Amodei and others, "An Empirical Model of Large-Batch Training"
    (2018), appendix A.1.
    """

    def __init__(self) -> None:
        self._half, self._whole, self._sizes = list[float](), list[float](), (0, 0)

    def of_half(self, work: BenchmarkTask, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Measure the gradient over the first half of a batch."""
        half = len(x) // 2
        if half == 0:
            return
        norms = batch_norms(model)
        # The extra forward must not change running statistics, or measuring would change the training.
        for module in norms:
            module.track_running_stats = False
        model.zero_grad()
        work.loss(model(x[:half]), y[:half]).backward()
        for module in norms:
            module.track_running_stats = True
        self._half.append(_squared_norm(model))
        self._sizes = (half, len(x))

    def of_whole(self, model: nn.Module) -> None:
        """Measure the gradient over the full batch, after its backward."""
        # only for a batch of which `of_half` has measured half
        if len(self._whole) < len(self._half):
            self._whole.append(_squared_norm(model))

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None if noise hides the gradient, or if nothing was measured."""
        if not self._whole:
            return None
        small, large = self._sizes
        of_small, of_large = (sum(values) / len(values) for values in (self._half, self._whole))
        # A gradient over B samples has the expected squared norm |G|^2 + tr(S) / B, with the true gradient G and the
        # covariance S of one sample's gradient. Two batch sizes give both unknowns; the noise scale is tr(S) / |G|^2.
        squared = (large * of_large - small * of_small) / (large - small)  # of the true gradient
        spread = (of_small - of_large) / (1 / small - 1 / large)  # trace of the covariance of one sample's gradient
        scale = spread / squared if squared > 0 else math.inf
        return scale if 0 < scale < math.inf else None


def _squared_norm(model: nn.Module) -> float:
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
