"""The training loop: steps, records, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zerofit.data import Data, Order, default_workers, eval_batches, micro_batches
from zerofit.spec.folder import Job
from zerofit.train.batch_stats import average_batch_statistics
from zerofit.train.place import Place
from zerofit.train.record import Recorder
from zerofit.train.sinks import Events


class AnyDriver(Protocol):
    """What the loop needs of a driver."""

    engine: Any
    device: torch.device
    module: nn.Module

    def train_step(self, batches: Iterator[dict[str, Any]]) -> Tensor:
        """One optimizer step; the losses of its micro batches on this rank."""

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> Tensor:
        """Summed loss, targets and right answers over all ranks."""


@dataclass
class Loop:
    """Everything that one rank's training needs, put together by `zerofit.train.run`."""

    job: Job
    place: Place
    data: Data
    driver: AnyDriver
    recorder: Recorder
    events: Events

    def run(self) -> dict[str, float]:
        """Train all steps; the last evaluation's figures."""
        job, every = self.job, self.job.run.eval_every
        seen: list[np.ndarray] = []
        batches = self._noting(self._weighted(), seen)
        figures: dict[str, float] = {}
        for step in range(job.steps):
            lr = self.driver.engine.get_lr()[0]
            losses = self.driver.train_step(batches)
            self.recorder.add(step, losses, tuple(seen), lr, self.driver.engine.get_global_grad_norm())
            seen.clear()
            if step + 1 == job.steps or (every and (step + 1) % every == 0):
                figures = self.evaluate(step)
        return figures

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and accuracy (images) or perplexity (text) over the validation samples, exact on any layout."""
        self.recorder.flush()
        self.events("phase", text="evaluating")
        average_batch_statistics(self.driver.module, self.driver.engine.seq_data_parallel_group)
        batches = eval_batches(
            self.data.valid, self.place.dp_rank, self.job.layout.dp, self.job.batch.micro, self.job.run.eval_samples
        )
        total, targets, right = self.driver.evaluate(batches).tolist()
        loss = total / max(targets, 1.0)
        figures = {"loss": loss}
        if self.job.facts.task == "image":
            figures["accuracy"] = right / max(targets, 1.0)
        else:
            figures["perplexity"] = math.exp(min(loss, 700.0))
        self.events("eval", step=step + 1, **figures)
        self.recorder.skip_time()
        return figures

    def _weighted(self) -> Iterator[dict[str, Any]]:
        """This rank's micro batches in order, each with the weight that makes the mean over all targets exact."""
        job, batch = self.job, self.job.batch
        order = Order(len(self.data.train), job.run.seed)
        slices = (
            range(start, start + batch.micro)
            for step in range(job.steps)
            for start in (
                step * batch.total + (k * batch.dp + self.place.dp_rank) * batch.micro
                for k in range(batch.accumulation)
            )
        )
        workers = job.run.data_workers
        if workers is None:
            workers = default_workers(self.data, job.layout.world_size)
        step, weight = -1, 0.0
        for micro in micro_batches(self.data.train, order, slices, workers):
            if micro["positions"].start // batch.total != step:
                step = micro["positions"].start // batch.total
                indices = order.indices(step * batch.total, (step + 1) * batch.total)
                ranks = batch.dp * job.layout.sp
                weight = batch.accumulation * ranks / max(1, self.data.train.targets(indices))
            yield micro | {"weight": weight}

    @staticmethod
    def _noting(batches: Iterator[dict[str, Any]], seen: list[np.ndarray]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            seen.append(batch["indices"])
            yield batch
