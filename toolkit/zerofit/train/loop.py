"""The training loop: steps, records, evaluations, checkpoints."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.data.base import Data
from zerofit.data.loader import Order, default_workers, eval_batch_count, eval_batches, micro_batches
from zerofit.data.mixing import MicroSlice, StepImages
from zerofit.models.batch_norm import batch_norms
from zerofit.models.inputs import LabelledTextInputs, SegmentationInputs
from zerofit.models.scores import class_scores, mean_iou
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.model_facts import is_text
from zerofit.spec.run_folder import Job
from zerofit.train.callbacks import Callback, EventLog, overridden
from zerofit.train.heartbeat import RankProgress
from zerofit.train.leaks import LeakWatch
from zerofit.train.metrics import MetricsRecorder
from zerofit.train.step_profile import StepProfile
from zerofit.train.stop_signals import StopRequests
from zerofit.train.trainer import Batch, EngineTrainer

REPORT_EVERY_S = 2.0  # progress messages of an evaluation, and exchanges of stop requests


class _StopRequested(Exception):
    """Raised on all ranks at the same batch if a stop was requested during an evaluation."""


@dataclass(frozen=True)
class LoopResult:
    """How a loop ended."""

    step: int  # optimizer steps done, earlier starts included
    stopped: bool  # stopped on request before the last step
    figures: dict[str, float]  # of the last evaluation


@dataclass
class Loop:
    """The training loop of one rank, assembled by `zerofit.train.run`."""

    job: Job
    data: Data
    trainer: EngineTrainer
    recorder: MetricsRecorder
    events: EventLog
    requests: StopRequests
    progress: RankProgress
    save: Callable[[int, dict[str, object], bool], Problem | None]  # of `zerofit.train.saver.Saver`
    callbacks: Sequence[Callback] = ()
    profile: StepProfile | None = None  # of the chosen steps, if this rank is profiled
    leaks: LeakWatch | None = None  # on rank 0
    interrupted: bool = False  # a stop was requested during an evaluation

    def run(self) -> LoopResult:
        """Train all steps, or until a stop is requested."""
        gc.collect()
        gc.freeze()  # objects made so far live until the end, so the collector can skip them
        try:
            return self._train()
        finally:
            gc.unfreeze()
            if self.profile:
                self.profile.close()

    def _train(self) -> LoopResult:
        job, trainer, every = self.job, self.trainer, self.job.run.eval_every
        figures: dict[str, float] = {}
        for step, batches, indices in self.steps():
            # read before the step: the scheduler then sets the next step's rate
            lr = trainer.engine.get_lr()[0]
            with self.profile.step(step + 1) if self.profile else nullcontext():
                losses = self.train_step(batches)
            self.record(step, losses, indices, lr)
            if step + 1 == job.steps or (every and (step + 1) % every == 0):
                figures = self.evaluate(step)
            if self.save_and_stop(step + 1):
                return LoopResult(step=step + 1, stopped=True, figures=figures)
        figures = figures or self.evaluate(job.steps - 1)
        return LoopResult(step=job.steps, stopped=self.interrupted, figures=figures)

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one optimizer step. Return the losses of its micro batches.

        With --check-loss, raises RunFailed for a loss that is not finite.
        """
        try:
            with self.leaks.step() if self.leaks else nullcontext():
                losses = self.trainer.train_step(batches)
            if self.trainer.loss_check:
                self.trainer.loss_check.after_step()
        except RunFailed:  # on all ranks: the last good steps must be in the metrics
            self.recorder.flush()
            raise
        return losses

    def steps(self) -> Iterator[tuple[int, Iterator[Batch], list[np.ndarray]]]:
        """Yield each remaining step (from 0), its micro batches, and a list for sample indices."""
        order = Order.of(self.data.train, self.job.run.seed)
        images = StepImages.of(self.job.run, self.job.steps, self.data.inputs)
        slices, mixing = self._slices(order, images), images and images.mixing
        micro = micro_batches(self.data.train, order, slices, self._workers(), mixing, self._on_gpu)
        before_step = overridden(self.callbacks, "on_step_begin")
        self.progress.first = self.first
        for step in range(self.first, self.job.steps):
            self.progress.step = step
            if before_step:
                # their time does not count as part of the step
                for on_step_begin in before_step:
                    on_step_begin(step)
                self.recorder.skip_time()
            indices: list[np.ndarray] = []
            yield step, self._step_batches(step, micro, order, indices), indices

    def record(self, step: int, losses: Tensor, indices: Sequence[np.ndarray], lr: float) -> None:
        """Record a step: the losses of its micro batches on this rank, and their samples."""
        norm = self.trainer.engine.get_global_grad_norm()
        self.recorder.add(step, losses, indices, lr, norm, self.trainer.extra_metrics())

    @property
    def first(self) -> int:
        """Number of steps done before this start."""
        return self.job.start.step if self.job.start else 0

    def _slices(self, order: Order, images: StepImages | None) -> Iterator[range | MicroSlice]:
        """Yield the global positions of this rank's micro batches, with settings for their images."""
        batch, dp_rank = self.job.batch, self.trainer.coords.dp_rank
        for step in range(self.first, self.job.steps):
            first = self.job.samples_after(step)
            for k in range(batch.accumulation):
                positions = batch.positions(k, dp_rank)
                micro = range(first + positions.start, first + positions.stop)
                if images is None:
                    yield micro
                else:
                    key = int(order.keys(first, first + 1)[0])
                    yield images.slice(micro, step, range(first, first + batch.total), key)

    def _step_batches(
        self, step: int, micro: Iterator[Batch], order: Order, indices: list[np.ndarray]
    ) -> Iterator[Batch]:
        """Yield a step's micro batches with their loss weight. Append sample indices to `indices`."""
        batch = self.job.batch
        first = self.job.samples_after(step)
        targets = self.data.train.targets(order.indices(first, first + batch.total))
        # The engine averages over micro batches (accumulation) and ranks (dp x sp). A micro batch's loss is a sum over
        # its targets, so this weight turns the engine's mean into the mean over all targets of the global batch.
        weight: float | Tensor = batch.accumulation * batch.dp * self.job.layout.sp / max(1, targets)
        if batch.by_rank:
            # for a plain number, `weighted_cross_entropy` assumes micro batches of equal size
            weight = torch.tensor(weight)
        for loaded in islice(micro, batch.accumulation):
            indices.append(loaded["indices"])
            yield loaded | {"weight": weight}

    def save_and_stop(self, done: int) -> bool:
        """Save if a save is due after `done` steps or was requested. Return whether to stop."""
        requests, recorder = self.requests, self.recorder
        # an interrupted last evaluation is repeated after a resume, so the run is not complete
        last = done == self.job.steps and not self.interrupted
        stop = recorder.stop_requested and not last
        if not (stop or requests.due_at(done) or recorder.save_requested or (last and requests.saving)):
            return False
        recorder.flush()  # a loss that is not finite must not be saved
        self.events.phase(f"saving step {done}")
        requests.saved()
        recorder.save_requested = False
        problem = self.save(done, dict(recorder.last or {}), self.job.run.save_async and not (stop or last))
        recorder.skip_time()
        self.progress.step = done
        self.events.training(steps=self.job.steps)
        if problem and (stop or last):
            raise RunFailed(problem)
        return stop

    def evaluate(self, step: int) -> dict[str, float]:
        """Return loss and accuracy (images) or perplexity (text) over the validation samples.

        The figures are exact in any layout. For masks there is also the mean IoU, for labelled text the F1 score,
        and for an encoder-decoder ROUGE of its generated text. With averaged weights, their figures are added under
        names that begin with ema_. If a rank was asked to stop during the evaluation, returns {}.
        """
        self.recorder.flush()
        self.events.phase("evaluating")
        try:
            figures = self._figures(step) | self.trainer.written_figures(self.data)
            if self.trainer.averaged:
                with self.trainer.averaged.in_place():
                    figures |= {f"ema_{name}": figure for name, figure in self._figures(step).items()}
        except _StopRequested:
            self.interrupted = True
            return {}
        for callback in (self.events, *self.callbacks):
            callback.on_evaluate(step + 1, figures)
        self.recorder.skip_time()
        return figures

    def _figures(self, step: int) -> dict[str, float]:
        trainer, job = self.trainer, self.job
        average_batch_statistics(trainer.module, trainer.engine.seq_data_parallel_group)
        valid, dp, micro, most = self.data.valid, job.layout.dp, job.batch.micro, job.run.eval_samples
        batches = eval_batches(valid, trainer.coords.dp_rank, dp, micro, most, self._workers(), self._on_gpu)
        count = eval_batch_count(len(valid), dp, micro, most)
        total, targets, right, *table = trainer.evaluate(self._watched(batches, count), count).tolist()
        loss = total / max(targets, 1.0)
        if not math.isfinite(loss):
            self.recorder.stop_at_evaluation(step, loss)
        figures, inputs = {"loss": loss}, self.data.inputs
        if isinstance(inputs, LabelledTextInputs):
            figures |= class_scores(table, inputs.classes, inputs.tags)
        elif isinstance(inputs, SegmentationInputs):
            figures |= {"pixel_accuracy": right / max(targets, 1.0), "mean_iou": mean_iou(table)}
        elif is_text(job.facts.task):
            figures["perplexity"] = math.exp(min(loss, 700.0))
        else:
            figures["accuracy"] = right / max(targets, 1.0)
        return figures

    def _watched(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Yield the batches. Report progress, and stop all ranks if a stop was requested on any."""
        start = reported = time.monotonic()
        # an exchange at each batch would cost time, so the next one comes after as many batches as take two seconds
        exchange_at = 1 if self.job.layout.pp == 1 else count  # a pipeline's stages do not read the same batches
        for done, batch in enumerate(batches):
            if done == exchange_at:
                batch_s = self.recorder.exchange_stop((time.monotonic() - start) / done)
                exchange_at += max(1, int(REPORT_EVERY_S / max(batch_s, 1e-6)))
                if self.recorder.stop_requested:
                    raise _StopRequested
            if time.monotonic() - reported > REPORT_EVERY_S:
                self.events.phase(f"evaluating ({done} of {count} batches; use fewer with --eval-samples)")
                reported = time.monotonic()
            yield batch

    @property
    def _on_gpu(self) -> bool:
        return self.trainer.engine.device.type == "cuda"

    def _workers(self) -> int:
        workers = self.job.run.data_workers
        return default_workers(self.data, int(os.environ.get("LOCAL_SIZE", 1))) if workers is None else workers


@torch.no_grad()
def average_batch_statistics(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a data parallel group the mean of batch norm's running statistics."""
    # Each rank's means and variances come from its own micro batches, and DeepSpeed does not synchronize them.
    # Evaluation and the saved model use the mean over ranks. Training does not use these statistics.
    statistics = [
        tensor for norm in batch_norms(model) for tensor in (norm.running_mean, norm.running_var) if tensor is not None
    ]
    if not statistics or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.float().reshape(-1) for t in statistics])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(statistics, flat.split([t.numel() for t in statistics]), strict=True):
        tensor.copy_(mean.view_as(tensor))
