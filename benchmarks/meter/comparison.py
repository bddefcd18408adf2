"""One configuration's real, simulated and forecast memory side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerofit.simulate.record import SimulationTarget
from zerofit.spec.mesh import first_of_stages

from .pool import Ranks


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most bytes that one rank's tensors and kernels had at once in one optimizer step (-1: before the first)."""

    rank: int
    step: int
    phase: str  # in which the real run had its peak
    real_bytes: int
    simulated_bytes: int  # what `zerofit simulate` answers
    with_kernels_bytes: int  # the same where each kernel takes the scratch measured on this machine

    def error(self, forecast: str) -> float:
        """Relative error of "simulated" or "with_kernels"."""
        return getattr(self, f"{forecast}_bytes") / self.real_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All ranks and steps of a configuration."""

    name: str
    peaks: tuple[Peak, ...]
    planned_bytes: int  # what `zerofit plan` reckons for the whole run of the rank that needs most
    answered_rank: int  # with which `zerofit simulate` answers, without --rank

    @property
    def highest(self) -> Peak:
        """Of all ranks and all steps, the start included: what a plan is about."""
        return max(self.peaks, key=lambda peak: peak.real_bytes)

    def errors(self, forecast: str) -> list[float]:
        """Of a simulation in every training step of every rank; of a plan and of an answer one, in the highest peak."""
        if forecast == "planned":
            return [self.planned_bytes / self.highest.real_bytes - 1]
        if forecast == "answered":
            answer = max(peak.with_kernels_bytes for peak in self.peaks if peak.rank == self.answered_rank)
            return [answer / self.highest.real_bytes - 1]
        return [peak.error(forecast) for peak in self.peaks if peak.step >= 0]

    def worst(self, forecast: str) -> float:
        """The error that is furthest from 0."""
        return max(self.errors(forecast), key=abs)

    def line(self) -> str:
        """For the progress output."""
        cells = [f"{what} {percent(self.worst(what))}" for what in ("simulated", "with_kernels", "planned", "answered")]
        return f"{self.name:44}" + "  ".join(cells)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        peaks = [asdict(peak) for peak in self.peaks]
        answers = {"planned_bytes": self.planned_bytes, "answered_rank": self.answered_rank}
        return {"name": self.name, **answers, "peaks": peaks}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the errors of a forecast may be at most."""

    forecast: str
    median: float
    most: float

    def errors(self, found: Sequence[Comparison]) -> list[float]:
        """Sizes of all errors."""
        return [abs(error) for one in found for error in one.errors(self.forecast)]

    def met(self, found: Sequence[Comparison]) -> bool:
        """Whether median and maximum are within the goal; true where there is nothing to judge."""
        errors = self.errors(found)
        return not errors or (statistics.median(errors) <= self.median and max(errors) <= self.most)


TARGETS = (
    Goal(forecast="with_kernels", median=0.001, most=0.01),
    Goal(forecast="planned", median=0.02, most=0.05),
    Goal(forecast="answered", median=0.001, most=0.01),
)


def percent(error: float) -> str:
    """With its sign."""
    return f"{100 * error:+.3f} %"


def compare(name: str, target: SimulationTarget, ranks: Ranks) -> Comparison:
    """Train it for real, simulate and forecast it. Raises RuntimeError where a rank fails."""
    real, simulated = ranks.real(target), ranks.simulated(target)
    planned_bytes, answered_rank = ranks.planned(target)["peak_bytes"], _answered_rank(target, simulated)
    return Comparison(
        name=name, peaks=_peaks(target, real, simulated), planned_bytes=planned_bytes, answered_rank=answered_rank
    )


def _answered_rank(target: SimulationTarget, simulated: list[dict[str, Any]]) -> int:
    """The rank that needs most, of those that the first ranks of the pipeline's stages name."""
    named = [(simulated[first]["heavier_rank"], first) for first in first_of_stages(target.job.layout)]
    ranks = [first if heavier is None else heavier for heavier, first in named]
    return max(ranks, key=lambda rank: simulated[rank]["peaks"][0]["bytes"])


def _peaks(target: SimulationTarget, real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> tuple[Peak, ...]:
    without_kernels = [dict(answer["without_kernels"]) for answer in simulated]
    return tuple(
        Peak(
            rank=rank,
            step=step,
            phase=_highest(answer, step)["name"],
            real_bytes=peak_bytes(answer, step),
            simulated_bytes=without_kernels[rank][step] - simulated[rank]["phases"][0]["start_bytes"],
            with_kernels_bytes=peak_bytes(simulated[rank], step),
        )
        for rank, answer in enumerate(real)
        for step in range(-1, target.steps)
    )


def _highest(answer: dict[str, Any], step: int) -> dict[str, Any]:
    return max((p for p in answer["phases"] if p["step"] == step), key=lambda phase: phase["peak_bytes"])


def peak_bytes(answer: dict[str, Any], step: int) -> int:
    """Over what was alive when the rank began to build its model."""
    return _highest(answer, step)["peak_bytes"] - answer["phases"][0]["start_bytes"]
