"""Choose the next configuration to measure, and estimate what untried ones may save.

This module uses neither a clock nor processes, so a search can be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.result import SAME_SPEED, plain
from zerofit.report.html_table import html_table
from zerofit.spec.files import field_data, plain_data
from zerofit.tune.step_time_model import StepTimeModel
from zerofit.tune.trial import Candidate, Trial, describe

ENOUGH = 0.005  # smallest expected gain, relative to the best step time, that is worth a trial
NO_ROOM = ("oom", "does-not-fit")
CRASHES = 2  # a family with this many failed trials is not tried any more
OPTIMISTIC = 1.645  # standard deviations: 1 in 20 configurations is faster


class Measured(NamedTuple):
    """A configuration with a measured step time."""

    candidate: Candidate
    step_s: float
    trial: Trial

    @property
    def sample_s(self) -> float:
        """Seconds per sample."""
        return self.step_s / self.candidate.layout.global_batch


@dataclass(frozen=True, kw_only=True)
class Regret:
    """How much faster untried configurations may be than the best measured one."""

    best_step_s: float  # measured
    untried: int
    untried_step_s: float | None  # expected of the best untried configuration; None if all were tried
    untried_best: Candidate | None
    gap: float  # expected relative saving by the best untried configuration; at least 0
    at_most: float  # largest relative saving by any untried configuration, with 5 % risk


# Bayesian optimization over a list of configurations. A trial costs a minute, a forecast a millisecond.
#
#     1. The first trial is the simplest of those with the best forecasts.
#     2. Each trial corrects the forecasts of all configurations (`StepTimeModel`): mean and deviation
#        of log(step time).
#     3. The next trial is the one with the largest expected gain over the best so far (`expected_gain`).
#     4. The search ends if no trial promises half a percent. `Regret` states what may have been missed.
@dataclass
class Search:
    """All candidates, and the trials so far. Candidates are compared by their time per sample."""

    candidates: Sequence[Candidate]
    trials: list[Trial] = field(default_factory=list)

    def next(self) -> Candidate | None:
        """Return the candidate with the highest expected gain; None if none is worth a trial.

        Before the first measurement, return the simplest of the candidates with the best forecasts.
        """
        untried = self._untried()
        if not untried:
            return None
        best = self.best
        if best is None:
            least = min(c.forecast_step_s / c.layout.global_batch for c in untried)
            near = [c for c in untried if c.forecast_step_s / c.layout.global_batch <= (1 + SAME_SPEED) * least]
            return min(near, key=lambda c: plain(c.layout))
        learned = self.learned()
        gains = [(expected_gain(*_log_sample_s(learned, c), best.sample_s), c) for c in untried]
        # of equal gains, the simplest layout
        gain, candidate = max(gains, key=lambda pair: (pair[0], tuple(-value for value in plain(pair[1].layout))))
        return candidate if gain >= ENOUGH else None

    def add(self, trial: Trial) -> None:
        """Add a trial."""
        self.trials.append(trial)

    @property
    def best(self) -> Measured | None:
        """The fastest measured configuration."""
        return min(self.measured, key=lambda m: m.sample_s, default=None)

    @property
    def measured(self) -> list[Measured]:
        """The trials with a step time."""
        by_key = self.by_key
        return [
            Measured(by_key[t.key], t.measured_step_s, t)
            for t in self.trials
            if t.key in by_key and t.measured_step_s is not None
        ]

    def regret(self) -> Regret | None:
        """Compare untried configurations with the best measured one; None if nothing was measured."""
        best = self.best
        if best is None:
            return None
        learned = self.learned()
        rows = [(*_log_sample_s(learned, c), c.key, c) for c in self._untried()]
        if not rows:
            return Regret(
                best_step_s=best.step_s, untried=0, untried_step_s=None, untried_best=None, gap=0.0, at_most=0.0
            )
        mean, _, _, untried_best = min(rows, key=lambda row: row[:3])
        fastest = min(mean - OPTIMISTIC * deviation for mean, deviation, *_ in rows)
        gap, most = (max(0.0, 1 - math.exp(log_s) / best.sample_s) for log_s in (mean, fastest))
        return Regret(
            best_step_s=best.step_s,
            untried=len(rows),
            untried_step_s=math.exp(mean) * untried_best.layout.global_batch,
            untried_best=untried_best,
            gap=gap,
            at_most=most,
        )

    def learned(self) -> StepTimeModel:
        """Return the model of step times, fitted to all trials."""
        return StepTimeModel([(m.candidate, m.step_s) for m in self.measured])

    @property
    def by_key(self) -> dict[str, Candidate]:
        """The candidates by their keys."""
        return {candidate.key: candidate for candidate in self.candidates}

    def _untried(self) -> list[Candidate]:
        """Return untried candidates that need less memory than every candidate that did not fit.

        Families that kept failing are left out.
        """
        tried, by_key = {trial.key for trial in self.trials}, self.by_key
        failed = [(by_key[t.key], t.status) for t in self.trials if t.key in by_key and t.status != "ok"]
        too_large = [c for c, status in failed if status in NO_ROOM]
        # A family may crash in a kernel of its own, so its other candidates would crash too. One crash may be chance.
        crashed = [_family(c) for c, status in failed if status in ("crash", "hang")]
        # with offloading, host memory may have been too small: this only rules out candidates with the same offload
        return [
            c
            for c in self.candidates
            if c.key not in tried
            and all(c.peak_bytes < f.peak_bytes for f in too_large if f.layout.offload in ("none", c.layout.offload))
            and crashed.count(_family(c)) < CRASHES
        ]


def expected_gain(mean: float, deviation: float, best_s: float) -> float:
    """Return the expected improvement of a trial, relative to the best step time.

    This is E[max(0, 1 - t / best)] for ln t ~ N(mean, deviation^2), the expected improvement of Jones, Schonlau and
    Welch, "Efficient Global Optimization of Expensive Black-Box Functions" (1998), applied to the logarithm of the
    step time.
    """
    edge = (math.log(best_s) - mean) / deviation
    share_below = NormalDist().cdf
    return share_below(edge) - math.exp(mean + deviation**2 / 2) / best_s * share_below(edge - deviation)


def _family(candidate: Candidate) -> tuple:
    """Return a key for the DeepSpeed code that a configuration runs."""
    layout = candidate.layout
    offload = (layout.offload_optimizer, layout.offload_param)
    return (
        layout.zero_stage,
        offload,
        layout.tp,
        layout.pp,
        layout.sp,
        layout.ep,
        layout.precision,
        candidate.compiled,
    )


def _log_sample_s(learned: StepTimeModel, candidate: Candidate) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of the seconds per sample."""
    mean, deviation = learned.expected(candidate)
    return mean - math.log(candidate.layout.global_batch), deviation


@dataclass(frozen=True, kw_only=True)
class TriedCandidate:
    """A configuration and its trial."""

    candidate: Candidate
    configuration: str  # a short description
    trial: Trial

    def to_dict(self) -> dict[str, object]:
        """Return a row of `trials` in `zerofit tune --json`."""
        return {**self.candidate.to_dict(), "configuration": self.configuration, **field_data(self.trial, "key")}


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The fastest measured configuration, and all trials."""

    measured: Measured
    seq_len: int | None  # None for images
    trials: tuple[TriedCandidate, ...]  # in order
    regret: Regret
    considered: int
    written: tuple[Path, ...] = ()

    @classmethod
    def of(cls, search: Search, seq_len: int | None) -> TuneResult | None:
        """Return the result of a search, without written files; None if no trial gave a step time."""
        best, regret = search.best, search.regret()
        if best is None or regret is None:
            return None
        by_key = search.by_key
        pairs = ((by_key[trial.key], trial) for trial in search.trials)
        trials = tuple(
            TriedCandidate(candidate=c, configuration=describe(c, search.candidates), trial=trial) for c, trial in pairs
        )
        return cls(measured=best, seq_len=seq_len, trials=trials, regret=regret, considered=len(search.candidates))

    @property
    def layout(self) -> PlannedLayout:
        """The fastest layout."""
        return self.measured.candidate.layout

    @property
    def step_s(self) -> float:
        """Measured seconds of an optimizer step with the fastest layout."""
        return self.measured.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the fastest layout."""
        return 1 / self.measured.sample_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the fastest layout; None for images."""
        return self.seq_len / self.measured.sample_s if self.seq_len else None

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `zerofit tune --json`."""
        speed = {name: getattr(self, name) for name in ("step_s", "samples_per_s", "tokens_per_s")}
        memory = {"peak_bytes": self.measured.trial.peak_bytes, "fits": True}
        return {
            "best": {**self.measured.candidate.to_dict(), **speed, **memory},
            **field_data(self, "measured", "seq_len", "written"),
            "written": plain_data(self.written),
        }

    def plot(self, path: Path) -> None:
        """Draw forecast against measured step times, and the best after each trial, into a PNG."""
        from zerofit.report.plot import draw_trials

        draw_trials([tried.to_dict() for tried in self.trials], path)

    def _repr_html_(self) -> str:
        rows = []
        for tried in self.trials:
            measured = tried.trial.measured_step_s
            outcome = tried.trial.status if measured is None else f"{measured:.4f} s"
            rows.append((tried.configuration, f"{tried.trial.forecast_step_s:.4f} s", outcome))
        return html_table(f"best: {self.layout}, {self.step_s:.4f} s per step", ("trial", "forecast", "measured"), rows)
