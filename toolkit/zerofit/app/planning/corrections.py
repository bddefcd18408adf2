"""Correct forecast step times by trials of `zerofit tune`, a measured speed, or a trace."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from zerofit.app.planning.layout_pins import DEGREES
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.plan.fit import Forecast
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import AS_MEASURED, PAIRS
from zerofit.plan.rates import rates_of
from zerofit.plan.result import PlanResult, RankedLayout
from zerofit.plan.search import search
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.time import Timer
from zerofit.report.traces import FORECAST_KINDS, HOST, ReadTrace, measured_kernels, read_trace
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.foreign import Unreadable, read_json, refused, shaped
from zerofit.spec.local_machine import Calibration
from zerofit.spec.named_code import refuse_foreign_code
from zerofit.spec.profile import Profile
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.tune.trial import Candidate

if TYPE_CHECKING:  # a plan without trials needs no numpy
    from zerofit.tune.step_time_model import StepTimeModel

MEASURED_FLAG = "--measured"
_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(samples/s|images/s|tokens/s|s)\s*", re.IGNORECASE)
AMPLE = 10**18  # bytes of memory that never limit a layout: the measured layout did fit
TRACE_FLAG = "--from-trace"
MOST_FACTOR = 100.0  # if measured and forecast times of a kind differ by more, they are not of the same kernels
TUNED_FLAG = "--from"
TUNED_HINT = "use the folder of `zerofit tune --output`"
TRIALS_FILE = "trials.json"  # in the folder of a tuning


@dataclass(frozen=True)
class TunedLayouts:
    """Measured configurations of one model on one kind of device."""

    path: Path
    model: str
    device: str
    measured: tuple[tuple[Candidate, float], ...]  # with step times in seconds

    def correct(self, layout: PlannedLayout, step_s: float) -> float:
        """Return the step time of a layout: its forecast `step_s`, corrected by the trials."""
        return math.exp(self._learned.expected(Candidate(layout=layout, forecast_step_s=step_s, peak_bytes=0))[0])

    @cached_property
    def _learned(self) -> StepTimeModel:
        from zerofit.tune.step_time_model import StepTimeModel

        return StepTimeModel(self.measured)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecasts' errors relative to the trials (`tuned` in `zerofit plan --json`)."""
        from zerofit.tune.step_time_model import forecast_errors

        errors = forecast_errors(self.measured)
        shares = {
            name: {"median": pair[0], "most": pair[1]} if pair else None for name, pair in errors._asdict().items()
        }
        return {"path": str(self.path), "model": self.model, "trials": len(self.measured), "errors": shares}


# The content of trials.json that a plan reads.
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class _TunedTrial:
    choice: PlannedLayout
    compiled: bool
    forecast_step_s: _Seconds
    peak_bytes: int
    measured_step_s: _Seconds


@dataclass(frozen=True, kw_only=True)
class _Tuning:
    model: str
    device: str
    measured: tuple[_TunedTrial, ...]


def read_tuned(path: Path) -> TunedLayouts:
    """Read the trials of `zerofit tune` from its folder or its trials.json. Raises UserError."""
    file = path / TRIALS_FILE if path.is_dir() else path
    with refused(file, kind="tuned", hint=TUNED_HINT, where=TUNED_FLAG):
        tuning = shaped(read_json(file), TypeAdapter(_Tuning))
        if not tuning.measured:
            raise Unreadable("it has no measured trial")
    pairs = []
    for trial in tuning.measured:
        candidate = Candidate(
            layout=replace(trial.choice, by_rank=()),  # trials use equal micro batches
            compiled=trial.compiled,
            forecast_step_s=trial.forecast_step_s,
            peak_bytes=trial.peak_bytes,
        )
        pairs.append((candidate, trial.measured_step_s))
    return TunedLayouts(file, tuning.model, tuning.device, tuple(pairs))


def refuse_other_device(tuned: TunedLayouts, kind: str) -> None:
    """Raise a UserError if the plan is for another kind of device than the trials."""
    if kind != tuned.device:
        message = f"{tuned.path} was measured on {tuned.device}, but the plan is for {kind}"
        hint = f"remove {TUNED_FLAG}, or use --gpu {tuned.device}"
        raise UserError(Problem(kind="tuned-elsewhere", message=message, hint=hint, where=TUNED_FLAG))


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """A number and its unit: "samples", "images" or "tokens" per second, or "s" per step."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> MeasuredSpeed:
        """Read "5.33samples/s", "21000 tokens/s" or "0.52s" (per step). Raises UserError."""
        match = _SPEED.fullmatch(text)
        if not match or not float(match[1]) > 0:
            hint = "write it like 5.33samples/s, 21000tokens/s (all devices together), or 0.52s (per step)"
            raise UserError(
                Problem(kind="bad-value", message=f"{MEASURED_FLAG}: got {text!r}", hint=hint, where=MEASURED_FLAG)
            )
        return cls(value=float(match[1]), unit=match[2].lower().partition("/")[0])

    def step_s(self, layout: PlannedLayout, seq_len: int | None) -> float:
        """Return the seconds per step of this layout. Raises UserError for tokens of an image model."""
        if self.unit == "s":
            return self.value
        # samples or images per second: step time = global batch / speed
        if self.unit != "tokens":
            return layout.global_batch / self.value
        if seq_len is None:
            message, hint = f"{MEASURED_FLAG} is in tokens, but the model uses images", "use images/s"
            raise UserError(Problem(kind="bad-value", message=message, hint=hint, where=MEASURED_FLAG))
        return layout.global_batch * seq_len / self.value


@dataclass(frozen=True, kw_only=True)
class MeasuredScaling:
    """A measured step time and the forecast for the same layout.

    Their quotient corrects the step times of all layouts.
    """

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

    def with_narrower_errors(self, result: PlanResult) -> PlanResult:
        """Return the result with narrower error intervals, since step times are corrected."""

        # An error that all layouts of one model on one machine share is in the factor, so it cancels.
        def narrowed(ranked: tuple[RankedLayout, ...]) -> tuple[RankedLayout, ...]:
            return tuple(replace(r, errors=AS_MEASURED if r.layout == self.layout else PAIRS) for r in ranked)

        return replace(result, layouts=narrowed(result.layouts), misfits=narrowed(result.misfits))

    def to_dict(self) -> dict[str, object]:
        """Return the value of `measured` in `zerofit plan --json`."""
        times = {"forecast_step_s": self.forecast_step_s, "measured_step_s": self.measured_step_s}
        return {"layout": self.layout.to_dict(), **times, "factor": self.factor}

    def __str__(self) -> str:
        return (
            f"step times are {self.factor:.3g} x their forecasts: {self.layout} took "
            f"{self.measured_step_s:.3g} s per step, forecast {self.forecast_step_s:.3g} s"
        )


def measured_layout(wanted: PlanRequest) -> PlanRequest:
    """Return the request for the measured layout; values not set get DeepSpeed's defaults.

    Raises UserError if the ZeRO stage or the micro batch is missing.
    """
    problems = Problems()
    for name, value in (("zero_stage", wanted.fixed.get("zero_stage")), ("micro_batch", wanted.micro_batch)):
        if value is None:
            flag = "--" + name.replace("_", "-")
            message = f"{MEASURED_FLAG} needs the measured layout, but {flag} is missing"
            problems.add("usage", message, f"add {flag}, and every other setting that was not the default", flag)
    problems.raise_if_any()
    degrees = {name: getattr(wanted, name) or 1 for name in DEGREES}
    return replace(
        wanted,
        **degrees,
        # a global batch already determines the accumulation steps
        accumulation=wanted.accumulation or (None if wanted.global_batch else 1),
        checkpointing=wanted.checkpointing or False,
        fixed={"offload_optimizer": "none", "offload_param": "none", **wanted.fixed},
    )


def scaling_of(
    speed: MeasuredSpeed,
    wanted: PlanRequest,
    profile: Profile,
    cluster: Cluster,
    forecast: Forecast,
    calibration: Calibration | None,
) -> MeasuredScaling:
    """Return the measured step time with its forecast. Raises UserError for an invalid layout."""
    ample = replace(cluster, host_memory=AMPLE, device_memory=AMPLE)
    best = search(profile, ample, measured_layout(wanted), forecast, calibration, top=1).layouts[0]
    # The forecast is the uncorrected time, since the factor is to correct forecasts.
    measured_s = speed.step_s(best.layout, profile.seq_len)
    return MeasuredScaling(layout=best.layout, forecast_step_s=best.time.step_s, measured_step_s=measured_s)


@dataclass(frozen=True, kw_only=True)
class TraceCalibration:
    """A calibration from a trace, with the forecast and measured time of the traced step."""

    path: Path
    calibration: Calibration = field(repr=False)
    layout: PlannedLayout | None  # None if the trace is not in a run folder; then only its shapes are used
    forecast_step_s: float | None
    measured_step_s: float

    def to_dict(self) -> dict[str, object]:
        """Return the value of `from_trace` in `zerofit plan --json`."""
        return {
            "trace": str(self.path),
            "layout": self.layout.to_dict() if self.layout else None,
            "forecast_step_s": self.forecast_step_s,
            "measured_step_s": self.measured_step_s,
            "shapes": len(self.calibration.kernels),
            "times_longer": dict(self.calibration.longer),
            "rest": self.calibration.slower,
        }

    def __str__(self) -> str:
        if self.layout is None:
            return (
                f"times of matrix products and attention are from {self.path}; other times are forecast, because the "
                "trace is not in a run folder"
            )
        kinds = ", ".join(f"{kind} x {times:.3g}" for kind, times in self.calibration.longer.items())
        return (
            f"kernel times are from {self.path}: {self.layout} took {self.measured_step_s:.3g} s per step (forecast "
            f"{self.forecast_step_s:.3g} s); {kinds}, total x {self.calibration.slower:.3g}"
        )


def calibrated(
    path: Path, cluster: Cluster, base: Calibration | None, report: Reporter, trust_model_code: bool = False
) -> TraceCalibration:
    """Return the stored calibration of this kind of device, corrected by a trace.

    If the trace is in a run folder, the function builds the model of that run. Raises UserError, for example if the
    folder names code as its model and `trust_model_code` is false.
    """
    trace = read_trace(path, TRACE_FLAG)
    if trace.forecast:
        raise _refused(f"{path} is a forecast, not a real trace", "use traces/rank-0-step-3.json of a run folder")
    if trace.on_device == cluster.on_cpu:
        traced, kind = ("a GPU" if trace.on_device else "CPUs"), cluster.device.kind
        raise _refused(f"{path} is from {traced}, but the plan is for {kind}", "set --gpu to the traced device")
    stored = base or Calibration(kind=cluster.device.kind, device_name="", devices=cluster.gpus, date="")
    kernels = measured_kernels(path)
    # The trace's kernels replace the stored kernels of the same kind and precision. The stored factors are relative
    # to the stored kernels, so they do not apply any more.
    replaced = {(kernel.kind, kernel.dtype) for kernel in kernels}
    others = tuple(kernel for kernel in stored.kernels if (kernel.kind, kernel.dtype) not in replaced)
    calibration = replace(stored, kernels=(*others, *kernels), origin=str(path), longer={}, slower=1.0)
    folder = RunFolder(path.absolute().parent.parent)
    if not folder.plan.is_file() or not folder.run.is_file():
        if calibration.kernels == (base.kernels if base else ()):
            hint = "trace with `zerofit train --profile` and leave the file in its run folder"
            raise _refused(f"{path} has no kernel shapes and is not in a run folder", hint)
        return TraceCalibration(
            path=path, calibration=calibration, layout=None, forecast_step_s=None, measured_step_s=trace.step_s
        )
    job = Job.read(folder)
    refuse_foreign_code(folder.run, trust_model_code, model=job.run.model, model_args=job.run.model_args)
    return _scaled_to_step(path, trace, job, calibration, cluster, report)


def _refused(message: str, hint: str) -> UserError:
    return UserError(Problem(kind="bad-trace", message=message, hint=hint, where=TRACE_FLAG))


# 1. For each kind of work on the first stage: longer = measured seconds / forecast seconds.
# 2. For the whole step: slower = measured step time / forecast with the factors of 1. This factor is for what the
#    trace does not split by kind.
def _scaled_to_step(
    path: Path, trace: ReadTrace, job: Job, calibration: Calibration, cluster: Cluster, report: Reporter
) -> TraceCalibration:
    """Return the calibration with which the forecast of the traced step is its measured time."""
    layout, profile = PlannedLayout.of(job), _profile_of(job, cluster, report)
    nodes = max(1, layout.world_size // cluster.gpus)
    cluster = replace(cluster, gpus=layout.world_size // nodes, nodes=nodes)
    software = Software.of(dict(job.run))
    timer = Timer(profile, cluster, rates_of(cluster, job.precision, calibration, software))
    forecast: defaultdict[str, float] = defaultdict(float)
    timeline = step_timeline(profile, timer, layout)
    for span in timeline.spans:
        if span.stage == 0:
            forecast[FORECAST_KINDS.get(span.kind, span.kind)] += span.end_s - span.start_s
    measured: defaultdict[str, float] = defaultdict(float)
    for part, seconds in trace.parts.items():
        measured[part.kind] += seconds
    longer = {
        kind: measured[kind] / seconds
        for kind, seconds in forecast.items()
        if seconds > 0
        and seconds / MOST_FACTOR < measured[kind] < seconds * MOST_FACTOR
        and not (kind == HOST and trace.on_device)  # the host runs ahead of a GPU
    }
    by_kind = replace(calibration, longer=longer)
    by_kind_s = Timer(profile, cluster, rates_of(cluster, job.precision, by_kind, software)).step(layout).step_s
    return TraceCalibration(
        path=path,
        calibration=replace(by_kind, slower=trace.step_s / by_kind_s),
        layout=layout,
        forecast_step_s=timer.step(layout).step_s,
        measured_step_s=trace.step_s,
    )


def _profile_of(job: Job, cluster: Cluster, report: Reporter) -> Profile:
    image = None
    if not job.run.seq_len:  # the inputs of other models depend on the data
        from zerofit.app.job.requests import as_request, input_option
        from zerofit.app.job.resolve import resolve_job

        image = input_option(resolve_job(as_request(job.run)).inputs)
    return get_profile(ProfileRequest.of_job(job, cluster.accelerator, image), report)[0]
