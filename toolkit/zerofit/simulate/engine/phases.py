"""Divide a rank's run into phases. The rank is real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from zerofit.simulate.record import RankPhase

# A pipeline engine's `train_batch` runs a list of instructions, which mixes the micro batches' forwards and backwards.
# So a phase begins with an instruction, not with a call. CommitP2P, which commits sends and receives of both
# directions, starts no phase.
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
    """Measures live bytes, and their peak since the last reset."""

    def live(self) -> int:
        """Return the live bytes."""
        ...

    def peak(self) -> int:
        """Return the peak of live bytes since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""


def phase_name(name: str, step: int) -> str:
    """Return the phase's name to show.

    If it belongs to an optimizer step, the name has the step's number.
    """
    return name if step < 0 else f"step {step + 1}: {name}"


# A phase ends where the next one begins, so phases cover the run without gaps. Their peak is the highest number
# of live bytes since the phase began, as torch.cuda.max_memory_allocated after a reset.
class PhaseLog:
    """Records the phases of a run."""

    def __init__(self, meter: MemoryMeter, on_begin: Callable[[str, int], None] = lambda name, step: None):
        self._meter, self.on_begin = meter, on_begin
        self._current: tuple[str, int] | None = None  # name, optimizer step
        self._start = 0
        self.step = -1  # the optimizer step that phases belong to from now on
        self.done: list[RankPhase] = []

    @property
    def name(self) -> str:
        """The current phase; "" if there is none."""
        return self._current[0] if self._current else ""

    def begin(self, name: str) -> None:
        """End the current phase and begin another one.

        If `name` is the current phase of this step, do nothing.
        """
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


def announce_phases(engine: DeepSpeedEngine, begin: Callable[[str], None]) -> None:
    """Make an engine call `begin` with the name of each phase when the phase begins."""
    if isinstance(engine, PipelineEngine):
        announced = {
            kind: _announced(function, begin, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else function
            for kind, function in engine._INSTRUCTION_MAP.items()
        }
        vars(engine)["_INSTRUCTION_MAP"] = announced  # of this engine only: the class has the original
        return
    for name in ("backward", "step"):
        setattr(engine, name, _announced(getattr(engine, name), begin, name))


def _announced(function: Callable[..., object], begin: Callable[[str], None], name: str) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        begin(name)
        return function(*args, **kwargs)

    return run
