"""The driver of a rank, real or simulated, with its phases noted while it is built and trains."""

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
from zerofit.simulate.phases import PhaseLog, announce_phases
from zerofit.spec.mesh import coords_of
from zerofit.spec.run_folder import Job
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer

Driver = ZeroTrainer | PipelineTrainer


def start(
    job: Job, rank: int, inputs: Inputs, log: PhaseLog, on_built: Callable[[nn.Module], None] = lambda model: None
) -> Driver:
    """Make the driver of a rank in a process group that stands: its model in phase "build", its engine in "init"."""
    initialize = deepspeed.initialize

    def announced(*args: Any, **kwargs: Any) -> Any:
        on_built(kwargs["model"])
        log.begin("init")
        return initialize(*args, **kwargs)

    log.begin("build")
    kind = PipelineTrainer if job.layout.pp > 1 else ZeroTrainer
    with patch.object(deepspeed, "initialize", announced):
        return kind(job, coords_of(rank, job.layout), inputs)


def train_steps(driver: Driver, batches: Iterator[dict[str, Any]], steps: int, log: PhaseLog) -> None:
    """Train this many steps; their phases are noted in the log, the last one ended."""
    announce_phases(driver.engine, log.begin)
    fetched = _fetched(batches, log.begin)
    for step in range(steps):
        log.step = step
        driver.train_step(fetched)
    log.end()


def empty_batches(job: Job, inputs: Inputs, samples: int = 0) -> Iterator[dict[str, Any]]:
    """Yield micro batches without any data, on the CPU for one rank, in the form of `zerofit.data.micro_batches`.

    `samples`: of one; 0: as the job has them.
    """
    while True:
        batch: dict[str, Any] = empty_batch(inputs, samples or job.batch.micro)
        batch["weight"] = job.layout.sp / batch["labels"].numel()
        if mixes(job.run) and isinstance(inputs, ImageInputs):
            batch["labels"] = torch.zeros(job.batch.micro, inputs.classes)
        yield batch
        del batch


def _fetched(batches: Iterator[dict[str, Any]], begin: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the batches; fetching one belongs to the forward."""
    while True:
        begin("forward")
        batch = next(batches, None)
        if batch is None:
            return
        yield batch
