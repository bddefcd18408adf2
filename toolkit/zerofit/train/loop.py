"""The training loop: steps, records, evaluations."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zerofit.data import Data, Order, default_workers, eval_batch_count, eval_batches, micro_batches
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.run_folder import Job
from zerofit.spec.task import is_text
from zerofit.train.batch_stats import average_batch_statistics
from zerofit.train.heartbeat import RankProgress
from zerofit.train.loggers import Events
from zerofit.train.metrics import MetricsRecorder
from zerofit.train.rank_coords import RankCoords
from zerofit.train.stop_signals import StopRequests

EVAL_WORD_S = 2.0


class EngineTrainer(Protocol):
    """What the loop needs of a driver."""

    job: Job
    engine: Any
    device: torch.device
    module: nn.Module

    def train_step(self, batches: Iterator[dict[str, Any]]) -> Tensor:
        """One optimizer step; the losses of its micro batches on this rank."""

    def evaluate(self, batches: Iterable[dict[str, Any]], count: int) -> Tensor:
        """Summed loss, targets and right answers over all ranks, of `count` batches on each."""


@dataclass(frozen=True)
class LoopResult:
    """How a loop ended."""

    step: int  # optimizer steps done in all
    stopped: bool  # on request, before the last step
    figures: dict[str, float]  # of the last evaluation


@dataclass
class Loop:
    """Everything that one rank's training needs, put together by `zerofit.train.run`."""

    job: Job
    place: RankCoords
    data: Data
    driver: EngineTrainer
    recorder: MetricsRecorder
    events: Events
    requests: StopRequests
    save: Callable[[int, dict[str, Any], bool], Problem | None]  # of `zerofit.train.saver.Saver`

    def run(self) -> LoopResult:
        """Train all steps, or until asked to stop."""
        gc.collect()
        gc.freeze()  # what exists by now stays until the end: collections in the loop need not walk it
        try:
            return self._train()
        finally:
            gc.unfreeze()

    def _train(self) -> LoopResult:
        job, every = self.job, self.job.run.eval_every
        seen: list[np.ndarray] = []
        batches = self._noting(self._weighted(), seen)
        figures: dict[str, float] = {}
        RankProgress.first = self.first
        for step in range(self.first, job.steps):
            RankProgress.step = step
            lr = self.driver.engine.get_lr()[0]
            losses = self.driver.train_step(batches)
            self.recorder.add(step, losses, tuple(seen), lr, self.driver.engine.get_global_grad_norm(), self._extra())
            seen.clear()
            if step + 1 == job.steps or (every and (step + 1) % every == 0):
                figures = self.evaluate(step)
            if self._save_and_stop(step + 1):
                return LoopResult(step=step + 1, stopped=True, figures=figures)
        return LoopResult(step=job.steps, stopped=False, figures=figures or self.evaluate(job.steps - 1))

    @property
    def first(self) -> int:
        """Steps that were done before this start."""
        return self.job.start.step if self.job.start else 0

    def _save_and_stop(self, done: int) -> bool:
        """Save where it is time after so many steps, or where asked to stop; whether to stop."""
        requests, recorder = self.requests, self.recorder
        last = done == self.job.steps
        stop = recorder.asked_to_stop and not last
        if not (stop or requests.due_at(done) or recorder.asked_to_save or (last and requests.saving)):
            return False
        recorder.flush()  # a loss that is not finite must not be saved
        self.events("phase", text=f"saving step {done}")
        requests.saved()
        recorder.asked_to_save = False
        problem = self.save(done, dict(recorder.last), self.job.run.save_async and not (stop or last))
        recorder.skip_time()
        self.events("training", steps=self.job.steps)
        if problem and (stop or last):
            raise RunFailed(problem)
        return stop

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and accuracy (images) or perplexity (text) over the validation samples, exact on any layout."""
        self.recorder.flush()
        self.events("phase", text="evaluating")
        average_batch_statistics(self.driver.module, self.driver.engine.seq_data_parallel_group)
        job, place = self.job, self.place
        batches = eval_batches(
            self.data.valid, place.dp_rank, job.layout.dp, job.batch.micro, job.run.eval_samples, self._workers()
        )
        count = eval_batch_count(len(self.data.valid), job.layout.dp, job.batch.micro, job.run.eval_samples)
        total, targets, right = self.driver.evaluate(self._counted(batches, count), count).tolist()
        loss = total / max(targets, 1.0)
        if not math.isfinite(loss):
            self.recorder.stop_at_evaluation(step, loss)
        figures = {"loss": loss}
        if is_text(job.facts.task):
            figures["perplexity"] = math.exp(min(loss, 700.0))
        else:
            figures["accuracy"] = right / max(targets, 1.0)
        self.events("eval", step=step + 1, **figures)
        self.recorder.evaluated(step, figures)
        self.recorder.skip_time()
        return figures

    def _counted(self, batches: Iterator[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
        """The batches, with a word on how many are done every few seconds."""
        said = time.monotonic()
        for done, batch in enumerate(batches):
            if time.monotonic() - said > EVAL_WORD_S:
                self.events("phase", text=f"evaluating ({done} of {count} batches; --eval-samples takes fewer)")
                said = time.monotonic()
            yield batch

    def _extra(self) -> dict[str, Any]:
        """What only some runs record: a GAN's two losses, fp16's loss scale and the steps it has skipped."""
        extra = self.driver.extra() if hasattr(self.driver, "extra") else {}
        if self.job.run.precision == "fp16":
            engine = self.driver.engine
            extra |= {"loss_scale": engine.optimizer.loss_scale, "skipped_steps": engine.skipped_steps}
        return extra

    def _weighted(self) -> Iterator[dict[str, Any]]:
        """This rank's micro batches in order, each with the weight that makes the mean over all targets exact."""
        job, batch = self.job, self.job.batch
        order = Order(len(self.data.train), job.run.seed)
        slices = (
            range(start, start + batch.micro)
            for step in range(self.first, job.steps)
            for start in (
                job.samples_after(step) + (k * batch.dp + self.place.dp_rank) * batch.micro
                for k in range(batch.accumulation)
            )
        )
        first = job.samples_after(self.first)
        step, weight = -1, 0.0
        for micro in micro_batches(self.data.train, order, slices, self._workers()):
            if (micro["positions"].start - first) // batch.total != step:
                step = (micro["positions"].start - first) // batch.total
                indices = order.indices(first + step * batch.total, first + (step + 1) * batch.total)
                ranks = batch.dp * job.layout.sp
                weight = batch.accumulation * ranks / max(1, self.data.train.targets(indices))
            yield micro | {"weight": weight}

    def _workers(self) -> int:
        """Loader processes of this rank."""
        asked = self.job.run.data_workers
        return default_workers(self.data, int(os.environ.get("LOCAL_SIZE", 1))) if asked is None else asked

    @staticmethod
    def _noting(batches: Iterator[dict[str, Any]], seen: list[np.ndarray]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            seen.append(batch["indices"])
            yield batch
