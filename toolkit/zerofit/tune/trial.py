"""A candidate, the outcome of its trial, and the step time of a run that is going on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from zerofit.plan.layout import PlannedLayout

Status = Literal["ok", "oom", "does-not-fit", "crash", "hang", "stopped"]
WARM_STEPS, WARM_S = 3, 2.0  # left out: compilation, caches, clocks
CHUNK_S = 0.5  # steps are taken together to pieces of at least so long, which hardly depend on each other
FEWEST = 5  # pieces


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that should fit, and what the planner expects of it."""

    layout: PlannedLayout
    compiled: bool = False  # by torch.compile, of which the planner knows nothing
    forecast_step_s: float  # seconds of one optimizer step
    peak_bytes: int  # forecast, on the device

    @property
    def key(self) -> str:
        """The same text for the same configuration: what trials are kept by."""
        values = {**asdict(self.layout), "compiled": self.compiled}
        return " ".join(f"{name}={value}" for name, value in values.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the knobs as --json and --space name them."""
        return {**self.layout.to_dict(), "compile": self.compiled}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate, measured or failed."""

    key: str
    status: Status
    forecast_step_s: float
    measured_step_s: float | None = None  # None unless the status is "ok"
    spread: float | None = None  # half the 95 % confidence interval of the mean step time, as a share of it
    steps: int = 0  # that were measured, without warm-up
    cut_short: bool = False  # once it was clear that it is slower than the best
    peak_bytes: int | None = None  # measured on rank 0
    reason: str = ""  # why it is not "ok"
    seconds: float = 0.0  # that the whole trial took

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for files."""
        return asdict(self)


def describe(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return a configuration in a few words: what sets it apart from the other candidates."""
    layout = candidate.layout
    parts = [f"ZeRO {layout.zero_stage}", f"micro batch {layout.micro_batch} x {layout.accumulation}"]
    parts += [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "sp", "ep") if getattr(layout, name) > 1]
    parts += [layout.offload] if layout.offload != "none" else []
    flags = {"checkpointing": layout.checkpointing, "overlap": layout.overlap, "compile": candidate.compiled}
    parts += [word for word, on in flags.items() if on]
    parts += [layout.precision] if len({c.layout.precision for c in candidates}) > 1 else []
    alike = [c.layout for c in candidates if c.layout.zero_stage == layout.zero_stage]
    if len({one.bucket for one in alike}) > 1:
        parts.append(f"buckets of {layout.bucket:,}")
    if len({one.persistence for one in alike}) > 1:
        parts.append(f"persistence of {layout.persistence:,}")
    return ", ".join(parts)


class Timing(NamedTuple):
    """Mean seconds a step."""

    step_s: float
    spread: float  # half the 95 % confidence interval, as a share of the mean; inf where too little is known
    steps: int


def timing(step_times: Sequence[float]) -> Timing | None:
    """Return the timing from the seconds of all steps in their order; None while the run is warming up."""
    warm = _warm(step_times)
    if not warm:
        return None
    means: list[float] = []
    seconds, count = 0.0, 0
    for one in warm:
        seconds, count = seconds + one, count + 1
        if seconds >= CHUNK_S:
            means.append(seconds / count)
            seconds, count = 0.0, 0
    mean = sum(warm) / len(warm)
    if len(means) < FEWEST:
        return Timing(mean, math.inf, len(warm))
    from scipy import stats  # takes a third of a second, which a plan that reads trials does not need

    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    return Timing(mean, float(half / mean), len(warm))


def _warm(step_times: Sequence[float]) -> Sequence[float]:
    """Return the steps after the first few and the first seconds."""
    passed = 0.0
    for number, one in enumerate(step_times):
        if number >= WARM_STEPS and passed >= WARM_S:
            return step_times[number:]
        passed += one
    return ()
