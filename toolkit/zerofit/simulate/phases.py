"""A driver's life cut into phases, alike for real ranks under an allocator meter and for simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest.mock import patch

import deepspeed
from deepspeed.runtime.pipe import schedule
from torch import nn

from zerofit.models.inputs import Inputs
from zerofit.simulate.record import RankPhase
from zerofit.spec.run_folder import Job
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer
from zerofit.train.rank_coords import coords_of

Driver = ZeroTrainer | PipelineTrainer

INSTRUCTIONS: dict[type, str] = {
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
        self._meter, self._on_begin = meter, on_begin
        self._name: str | None = None
        self._step, self._start = -1, 0
        self.done: list[RankPhase] = []

    def begin(self, name: str, step: int) -> None:
        """End the current phase and begin another one."""
        if (name, step) == (self._name, self._step):
            return
        self.end()
        self._name, self._step, self._start = name, step, self._meter.live()
        self._meter.reset_peak()
        self._on_begin(name, step)

    def end(self) -> None:
        """End the current phase, if there is one."""
        if self._name is not None:
            figures = {"start_bytes": self._start, "peak_bytes": self._meter.peak(), "end_bytes": self._meter.live()}
            self.done.append(RankPhase(name=self._name, step=self._step, **figures))
        self._name = None


def start(
    job: Job, rank: int, inputs: Inputs, log: PhaseLog, on_built: Callable[[nn.Module], None] = lambda model: None
) -> Driver:
    """Make the driver of a rank in a process group that stands: its model in phase "build", its engine in "init"."""
    initialize = deepspeed.initialize

    def announced(*args: Any, **kwargs: Any) -> Any:
        on_built(kwargs["model"])
        log.begin("init", -1)
        return initialize(*args, **kwargs)

    log.begin("build", -1)
    kind = PipelineTrainer if job.layout.pp > 1 else ZeroTrainer
    with patch.object(deepspeed, "initialize", announced):
        return kind(job, coords_of(rank, job.layout), inputs)


def train_steps(
    driver: ZeroTrainer | PipelineTrainer, batches: Iterator[dict[str, Any]], steps: int, log: PhaseLog
) -> None:
    """Train this many steps; their phases are noted in the log, the last one ended."""
    now = [0]
    _cut(driver, lambda name: log.begin(name, now[0]))
    fetched = _begun(batches, lambda: log.begin("forward", now[0]))
    for step in range(steps):
        now[0] = step
        driver.train_step(fetched)
    log.end()


def _begun(batches: Iterator[dict[str, Any]], begin: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """The batches; fetching one belongs to the forward."""
    while True:
        begin()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _cut(driver: Driver, begin: Callable[[str], None]) -> None:
    """Let the driver's engine say what it begins."""
    engine: Any = driver.engine
    if hasattr(engine, "_INSTRUCTION_MAP"):
        engine._INSTRUCTION_MAP = {
            kind: _announced(function, begin, INSTRUCTIONS[kind]) for kind, function in engine._INSTRUCTION_MAP.items()
        }
        return
    for name in ("backward", "step"):
        setattr(engine, name, _announced(getattr(engine, name), begin, name))


def _announced(function: Callable[..., Any], begin: Callable[[str], None], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin(name)
        return function(*args, **kwargs)

    return run
