"""Build the trainer of a real or simulated rank, train, and record the rank's phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast
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
    """Return a rank's trainer.

    The model is built in phase "build", and the engine in phase "init".
    """
    # the trainers build the model and the engine in one call, so the phase changes where they call DeepSpeed
    initialize = cast("Callable[..., object]", deepspeed.initialize)

    def announced(*args: object, model: nn.Module, **kwargs: object) -> object:
        on_built(model)
        log.begin("init")
        return initialize(*args, model=model, **kwargs)

    log.begin("build")
    kind = PipelineTrainer if job.layout.pp > 1 else ZeroTrainer
    with patch.object(deepspeed, "initialize", announced):
        return kind(job, coords_of(rank, job.layout), inputs)


def train_steps(driver: Driver, batches: Iterator[dict[str, object]], steps: int, log: PhaseLog) -> None:
    """Train `steps` steps, and record their phases in `log`."""

    def announced() -> Iterator[dict[str, object]]:
        while True:
            log.begin("forward")  # reading a micro batch belongs to its forward
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    announce_phases(driver.engine, log.begin)
    fetched = announced()
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
        tensors = empty_batch(inputs, samples)
        batch: dict[str, object] = {**tensors, "weight": job.layout.sp / tensors["labels"].numel()}
        del tensors  # only the batch keeps them
        if mixes(job.run) and isinstance(inputs, ImageInputs):
            batch["labels"] = torch.zeros(samples, inputs.classes)
        yield batch
        del batch
