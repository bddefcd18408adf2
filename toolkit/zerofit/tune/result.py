"""The result of a tuning: the fastest configuration, all trials, and what may have been missed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.plan.layout import PlannedLayout
from zerofit.report.html_table import html_table
from zerofit.spec.plain_data import field_data, plain_data
from zerofit.tune.search import Measured, Regret, Search
from zerofit.tune.trial import Candidate, Trial, describe


@dataclass(frozen=True, kw_only=True)
class TriedCandidate:
    """A configuration and its trial."""

    candidate: Candidate
    configuration: str  # in a few words
    trial: Trial

    def to_dict(self) -> dict[str, Any]:
        """Return a row of `trials` in `zerofit tune --json`."""
        return {**self.candidate.to_dict(), "configuration": self.configuration, **field_data(self.trial, "key")}


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The fastest configuration that was measured, beside all trials."""

    measured: Measured
    seq_len: int | None  # None for images
    trials: tuple[TriedCandidate, ...]  # in their order
    regret: Regret
    considered: int
    written: tuple[Path, ...] = ()

    @classmethod
    def of(cls, search: Search, seq_len: int | None) -> TuneResult | None:
        """Return the result of a search, before anything is written; None where no trial gave a step time."""
        best, regret = search.best, search.regret()
        if best is None or regret is None:
            return None
        by_key = {candidate.key: candidate for candidate in search.candidates}
        found = ((by_key[trial.key], trial) for trial in search.trials)
        trials = tuple(
            TriedCandidate(candidate=c, configuration=describe(c, search.candidates), trial=trial) for c, trial in found
        )
        return cls(measured=best, seq_len=seq_len, trials=trials, regret=regret, considered=len(search.candidates))

    @property
    def layout(self) -> PlannedLayout:
        """The fastest layout."""
        return self.measured.candidate.layout

    @property
    def step_s(self) -> float:
        """Measured seconds of its optimizer step."""
        return self.measured.step_s

    @property
    def samples_per_s(self) -> float:
        """Its samples a second."""
        return 1 / self.measured.sample_s

    @property
    def tokens_per_s(self) -> float | None:
        """Its tokens a second; None for images."""
        return self.seq_len / self.measured.sample_s if self.seq_len else None

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit tune --json` prints."""
        speed = {name: getattr(self, name) for name in ("step_s", "samples_per_s", "tokens_per_s")}
        memory = {"peak_bytes": self.measured.trial.peak_bytes, "fits": True}
        return {
            "best": {**self.measured.candidate.to_dict(), **speed, **memory},
            **field_data(self, "measured", "seq_len", "written"),
            "written": plain_data(self.written),
        }

    def plot(self, path: Path) -> None:
        """Draw forecast against measured step times, and the best after each trial, into a PNG."""
        from zerofit.report.tune_plot import draw_trials

        draw_trials([one.to_dict() for one in self.trials], path)

    def _repr_html_(self) -> str:
        rows = []
        for one in self.trials:
            measured = one.trial.measured_step_s
            told = one.trial.status if measured is None else f"{measured:.4f} s"
            rows.append((one.configuration, f"{one.trial.forecast_step_s:.4f} s", told))
        return html_table(f"best: {self.layout}, {self.step_s:.4f} s a step", ("trial", "forecast", "measured"), rows)
