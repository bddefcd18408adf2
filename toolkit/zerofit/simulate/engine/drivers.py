"""Build the trainer of a real or simulated rank, train, and record the rank's phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from torch import nn

from zerofit.data import mixes
from zerofit.models.build import empty_batch
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.simulate.engine.phases import PhaseLog, announce_phases
from zerofit.spec.mesh import coords_of
from zerofit.spec.run_folder import Job
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer

Driver = ZeroTrainer | PipelineTrainer


def start(
    job: Job, rank: int, inputs: Inputs, log: PhaseLog, on_built: Callable[[nn.Module], None] = lambda model: None
) -> Driver:
    """Return a rank's trainer. The model is built in phase "build", and the engine in phase "init"."""
    initialize = deepspeed.initialize

    def announced(*args: object, **kwargs: object) -> Any:
        on_built(kwargs["model"])
        log.begin("init")
        return initialize(*args, **kwargs)

    log.begin("build")
    kind = PipelineTrainer if job.layout.pp > 1 else ZeroTrainer
    with patch.object(deepspeed, "initialize", announced):
        return kind(job, coords_of(rank, job.layout), inputs)


def train_steps(driver: Driver, batches: Iterator[dict[str, object]], steps: int, log: PhaseLog) -> None:
    """Train `steps` steps, and record their phases in `log`."""
    announce_phases(driver.engine, log.begin)
    fetched = _fetched(batches, log.begin)
    for step in range(steps):
        log.step = step
        driver.train_step(fetched)
    log.end()


def empty_batches(job: Job, inputs: Inputs, samples: int = 0) -> Iterator[dict[str, object]]:
    """Yield micro batches without data, in the form of `zerofit.data.micro_batches`.

    `samples`: number of samples in a micro batch; 0: the job's number.
    """
    samples = samples or job.batch.micro
    while True:
        batch: dict[str, Any] = empty_batch(inputs, samples)
        batch["weight"] = job.layout.sp / batch["labels"].numel()
        if mixes(job.run) and isinstance(inputs, ImageInputs):
            batch["labels"] = torch.zeros(samples, inputs.classes)
        yield batch
        del batch


def _fetched(batches: Iterator[dict[str, object]], begin: Callable[[str], None]) -> Iterator[dict[str, object]]:
    while True:
        begin("forward")
        batch = next(batches, None)
        if batch is None:
            return
        yield batch
