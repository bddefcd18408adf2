"""A candidate, and what its trial has come to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from zerofit.plan.layout import PlannedLayout

Status = Literal["ok", "oom", "crash", "hang", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that should fit, and what the planner expects of it."""

    choice: PlannedLayout
    compiled: bool = False  # by torch.compile, of which the planner knows nothing
    forecast_step_s: float  # seconds of one optimizer step
    peak_bytes: int  # forecast, on the device

    @property
    def key(self) -> str:
        """The same text for the same configuration: what trials are kept by."""
        values = {**asdict(self.choice), "compiled": self.compiled}
        return " ".join(f"{name}={value}" for name, value in values.items())


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

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        return asdict(self)
