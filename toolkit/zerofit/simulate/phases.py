"""A driver's life cut into phases, alike for real ranks under an allocator meter and for simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from torch import nn

from zerofit.data import mixes
from zerofit.models.build import empty_batch
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.simulate.record import RankPhase
from zerofit.spec.mesh import coords_of
from zerofit.spec.run_folder import Job
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer

Driver = ZeroTrainer | PipelineTrainer

INSTRUCTIONS: dict[type, str] = {  # CommitP2P, for sends and receives of both ways, belongs to the phase that lasts
    schedule.LoadMicroBatch: "forward",
    schedule.RecvActivation: "forward",
    schedule.ForwardPass: "forward",
    schedule.SendActivation: "forward",
    schedule.RecvGrad: "backward",
    schedule.BackwardPass: "backward",
    schedule.SendGrad: "backward",
    schedule.ReduceTiedGrads: "step",
    schedule.ReduceGrads: "step",
    schedule.OptimizerStep: "step",
}


class MemoryMeter(Protocol):
    """Counts live bytes and the most there have been since the last reset."""

    def live(self) -> int:
        """Return the bytes alive now."""
        ...

    def peak(self) -> int:
        """Return the most bytes alive since the last reset, now included."""
        ...

    def reset_peak(self) -> None:
        """Begin to look for a new peak."""


class PhaseLog:
    """The phases so far. A phase that begins again while it lasts goes on."""

    def __init__(self, meter: MemoryMeter, on_begin: Callable[[str, int], None] = lambda name, step: None):
        self._meter, self.on_begin = meter, on_begin
        self._current: tuple[str, int] | None = None  # name, optimizer step
        self._start = 0
        self.step = -1  # the optimizer step that phases belong to from now on
        self.done: list[RankPhase] = []

    @property
    def name(self) -> str:
        """The current phase; "" where there is none."""
        return self._current[0] if self._current else ""

    def begin(self, name: str) -> None:
        """End the current phase and begin another one."""
        if (name, self.step) == self._current:
            return
        self.end()
        self._current, self._start = (name, self.step), self._meter.live()
        self._meter.reset_peak()
        self.on_begin(name, self.step)

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self._current is not None:
            name, step = self._current
            figures = {"start_bytes": self._start, "peak_bytes": self._meter.peak(), "end_bytes": self._meter.live()}
            self.done.append(RankPhase(name=name, step=step, **figures))
        self._current = None


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


def announce_phases(engine: Any, begin: Callable[[str], None]) -> None:
    """Let an engine say what it begins."""
    if hasattr(engine, "_INSTRUCTION_MAP"):
        engine._INSTRUCTION_MAP = {
            kind: _announced(function, begin, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else function
            for kind, function in engine._INSTRUCTION_MAP.items()
        }
        return
    for name in ("backward", "step"):
        setattr(engine, name, _announced(getattr(engine, name), begin, name))


def _announced(function: Callable[..., Any], begin: Callable[[str], None], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin(name)
        return function(*args, **kwargs)

    return run
