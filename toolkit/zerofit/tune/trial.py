"""Define a candidate and the outcome of its trial, and time the steps of a running trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from zerofit.plan.layout import PlannedLayout

Status = Literal["ok", "oom", "does-not-fit", "crash", "hang", "stopped"]
WARM_STEPS, WARM_S = 3, 2.0  # excluded, because of compilation, caches and clocks
CHUNK_S = 0.5  # steps are grouped into chunks of at least this length, which are nearly independent
FEWEST = 5  # chunks


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that should fit, with its forecast."""

    layout: PlannedLayout
    compiled: bool = False  # by torch.compile, which the planner does not model
    forecast_step_s: float  # seconds of one optimizer step
    peak_bytes: int  # forecast, on the device

    @property
    def key(self) -> str:
        """A text that identifies the configuration, to match trials with candidates."""
        values = {**asdict(self.layout), "compiled": self.compiled}
        if self.layout.has_weight_decay:  # the usual case; stored trials of earlier versions have no such field
            del values["has_weight_decay"]
        return " ".join(f"{name}={value}" for name, value in values.items())

    def to_dict(self) -> dict[str, object]:
        """Return the settings as --json and --space name them."""
        return {**self.layout.to_dict(), "compile": self.compiled}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate that was measured or that failed."""

    key: str
    status: Status
    forecast_step_s: float
    measured_step_s: float | None = None  # None unless the status is "ok"
    spread: float | None = None  # half the 95 % confidence interval of the mean step time, as a share of this mean
    steps: int = 0  # measured steps, without warm-up
    cut_short: bool = False  # stopped when it was clearly slower than the best
    peak_bytes: int | None = None  # measured on rank 0
    reason: str = ""  # why it is not "ok"
    seconds: float = 0.0  # of the trial, start-up included

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for files."""
        return asdict(self)


def describe(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """Describe a configuration briefly, without settings that are off.

    The precision is named only if candidates differ in it. Buckets and persistence are named only if candidates of the
    same ZeRO stage differ in them.
    """
    layout = candidate.layout
    parts = [f"ZeRO {layout.zero_stage}", f"micro batch {layout.micro_batch} x {layout.accumulation}"]
    parts += [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "sp", "ep") if getattr(layout, name) > 1]
    parts += [layout.offload] if layout.offload != "none" else []
    flags = {"checkpointing": layout.checkpointing, "overlap": layout.overlap, "compile": candidate.compiled}
    parts += [word for word, on in flags.items() if on]
    parts += [layout.precision] if len({c.layout.precision for c in candidates}) > 1 else []
    same_stage = [c.layout for c in candidates if c.layout.zero_stage == layout.zero_stage]
    if len({alternative.bucket for alternative in same_stage}) > 1:
        parts.append(f"buckets of {layout.bucket:,}")
    if len({alternative.persistence for alternative in same_stage}) > 1:
        parts.append(f"persistence of {layout.persistence:,}")
    return ", ".join(parts)


class Timing(NamedTuple):
    """Mean seconds per step."""

    step_s: float
    spread: float  # half the 95 % confidence interval, relative to the mean; inf if there are too few chunks
    steps: int


def timing(step_times: Sequence[float]) -> Timing | None:
    """Return the timing from the seconds of all steps, in order; None while the run warms up."""
    passed_s = accumulate(step_times, initial=0.0)  # before each step
    warmed_up = (n for n, seconds in enumerate(passed_s) if n >= WARM_STEPS and seconds >= WARM_S)
    warm = step_times[next(warmed_up, len(step_times)) :]
    if not warm:
        return None
    # consecutive steps depend on each other, which would make the interval too narrow; means of chunks hardly do
    means: list[float] = []
    seconds, count = 0.0, 0
    for step_s in warm:
        seconds, count = seconds + step_s, count + 1
        if seconds >= CHUNK_S:
            means.append(seconds / count)
            seconds, count = 0.0, 0
    mean = sum(warm) / len(warm)
    if len(means) < FEWEST:
        return Timing(mean, math.inf, len(warm))
    from scipy import stats  # imported late: it takes a third of a second

    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    return Timing(mean, float(half / mean), len(warm))
