"""A measured speed of one layout, used to scale all forecasts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from zerofit.app.planning.pins import DEGREES
from zerofit.plan.fit import Forecast
from zerofit.plan.interval import AS_MEASURED, PAIRS
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.result import PlanResult, RankedLayout
from zerofit.plan.search import search
from zerofit.plan.space import PlanRequest
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.local_machine import Calibration
from zerofit.spec.profile import Profile

FLAG = "--measured"
_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(samples/s|images/s|tokens/s|s)\s*", re.IGNORECASE)
AMPLE = 10**18  # bytes of unlimited memory, since the measured layout did fit


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """A number and its unit: "samples", "images" or "tokens" per second, or "s" (seconds per step)."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> MeasuredSpeed:
        """Read "5.33samples/s", "21000 tokens/s" or "0.52s". Raises UserError."""
        match = _SPEED.fullmatch(text)
        if not match or not float(match[1]) > 0:
            hint = "write it like 5.33samples/s, 21000tokens/s (all devices together), or 0.52s (per step)"
            raise UserError(Problem(kind="bad-value", message=f"{FLAG}: got {text!r}", hint=hint, where=FLAG))
        return cls(value=float(match[1]), unit=match[2].lower().partition("/")[0])

    def step_s(self, layout: PlannedLayout, seq_len: int | None) -> float:
        """Return the seconds per step of this layout. Raises UserError for tokens of an image model."""
        if self.unit == "s":
            return self.value
        if self.unit != "tokens":
            return layout.global_batch / self.value
        if seq_len is None:
            message, hint = f"{FLAG} is in tokens, but the model uses images", "use images/s"
            raise UserError(Problem(kind="bad-value", message=message, hint=hint, where=FLAG))
        return layout.global_batch * seq_len / self.value


@dataclass(frozen=True, kw_only=True)
class MeasuredScaling:
    """Ratio of measured to forecast step time of one layout: a factor for all layouts of this plan."""

    layout: PlannedLayout
    forecast_step_s: float
    measured_step_s: float

    @property
    def factor(self) -> float:
        """Measured / forecast."""
        return self.measured_step_s / self.forecast_step_s

    def correct(self, layout: PlannedLayout, step_s: float) -> float:
        """Return a forecast step time, scaled by the factor."""
        return self.factor * step_s

    def known(self, result: PlanResult) -> PlanResult:
        """Return the result with the narrower error intervals that apply after a measurement."""

        def narrowed(ranked: tuple[RankedLayout, ...]) -> tuple[RankedLayout, ...]:
            return tuple(replace(r, errors=AS_MEASURED if r.layout == self.layout else PAIRS) for r in ranked)

        return replace(result, layouts=narrowed(result.layouts), misfits=narrowed(result.misfits))

    def to_dict(self) -> dict[str, Any]:
        """Return `measured` in `zerofit plan --json`."""
        times = {"forecast_step_s": self.forecast_step_s, "measured_step_s": self.measured_step_s}
        return {"layout": self.layout.to_dict(), **times, "factor": self.factor}

    def __str__(self) -> str:
        return (
            f"step times are {self.factor:.3g} x their forecasts: {self.layout} took "
            f"{self.measured_step_s:.3g} s per step, forecast {self.forecast_step_s:.3g} s"
        )


def whole(wanted: PlanRequest) -> PlanRequest:
    """Return the measured layout, with DeepSpeed's defaults for what is not given. Raises UserError."""
    problems = Problems()
    for name, known in (("zero_stage", wanted.keep.get("zero_stage")), ("micro_batch", wanted.micro_batch)):
        if known is None:
            flag = "--" + name.replace("_", "-")
            message = f"{FLAG} needs the measured layout, but {flag} is missing"
            problems.add("usage", message, f"add {flag}, and every other setting that was not the default", flag)
    problems.raise_if_any()
    stays = {"offload_optimizer": "none", "offload_param": "none"}
    degrees = {name: getattr(wanted, name) or 1 for name in DEGREES}
    accumulation = wanted.accumulation or (None if wanted.global_batch else 1)
    return replace(
        wanted,
        **degrees,
        accumulation=accumulation,
        checkpointing=bool(wanted.checkpointing),
        keep={**stays, **wanted.keep},
    )


def scaling_of(
    speed: MeasuredSpeed,
    wanted: PlanRequest,
    profile: Profile,
    cluster: Cluster,
    forecast: Forecast,
    calibration: Calibration | None,
) -> MeasuredScaling:
    """Return the ratio of the measured layout to its forecast. Raises UserError if it is no valid layout."""
    ample = replace(cluster, host_memory=AMPLE, device_memory=AMPLE)
    best = search(profile, ample, whole(wanted), forecast, calibration, top=1).layouts[0]
    measured_s = speed.step_s(best.layout, profile.seq_len)
    return MeasuredScaling(layout=best.layout, forecast_step_s=best.time.step_s, measured_step_s=measured_s)
