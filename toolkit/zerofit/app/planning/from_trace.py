"""A trace of real steps as calibration: the time of each kind of kernel, by shape if the trace has shapes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.time import Timer
from zerofit.report.trace_kernels import measured_kernels
from zerofit.report.traces import FORECAST_KINDS, HOST, ReadTrace, read_trace
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import Calibration
from zerofit.spec.measured_kernels import MeasuredKernel
from zerofit.spec.named_code import refuse_foreign_code
from zerofit.spec.profile import Profile
from zerofit.spec.run_folder import Job, RunFolder

FLAG = "--from-trace"
MOST = 100.0  # a kind whose measured and forecast times differ by more than this factor is not the same work


@dataclass(frozen=True, kw_only=True)
class TraceCalibration:
    """The calibration from a trace, with the forecast and measured time of its step."""

    path: Path
    calibration: Calibration = field(repr=False)
    layout: PlannedLayout | None  # None: the trace is not in a run folder, so only its shapes are used
    forecast_step_s: float | None
    measured_step_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return `from_trace` in `zerofit plan --json`."""
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
            return f"matrix products and attention as in {self.path}, not in a run folder, so only shapes are used"
        kinds = ", ".join(f"{kind} x {times:.3g}" for kind, times in self.calibration.longer.items())
        return (
            f"kernels as in {self.path}: {self.layout} took {self.measured_step_s:.3g} s per step (forecast "
            f"{self.forecast_step_s:.3g} s); {kinds}, total x {self.calibration.slower:.3g}"
        )


def calibrated(
    path: Path, cluster: Cluster, base: Calibration | None, report: Reporter, trust_model_code: bool = False
) -> TraceCalibration:
    """Return the calibration of this kind of device from a trace, on top of stored measurements.

    Raises UserError, also if the run folder names code and `trust_model_code` is not set: its model is built.
    """
    trace = read_trace(path, FLAG)
    if trace.forecast:
        raise _refused(f"{path} is a forecast, not a real trace", "use traces/rank-0-step-3.json of a run folder")
    if trace.on_device == cluster.on_cpu:
        found, kind = ("a GPU" if trace.on_device else "CPUs"), cluster.device.kind
        raise _refused(f"{path} is from {found}, but the plan is for {kind}", "set --gpu to the traced device")
    kept = _with_kernels(base, measured_kernels(path), cluster, path)
    folder = RunFolder(path.absolute().parent.parent)
    if not folder.plan.is_file() or not folder.run.is_file():
        if kept.kernels == (base.kernels if base else ()):
            hint = "trace with `zerofit train --profile` and leave the file in its run folder"
            raise _refused(f"{path} has no kernel shapes and is not in a run folder", hint)
        return TraceCalibration(
            path=path, calibration=kept, layout=None, forecast_step_s=None, measured_step_s=trace.step_s
        )
    job = Job.read(folder)
    refuse_foreign_code(folder.run, trust_model_code, model=job.run.model, model_args=job.run.model_args)
    return _by_kind(path, trace, job, kept, cluster, report)


def _refused(message: str, hint: str) -> UserError:
    return UserError(Problem(kind="bad-trace", message=message, hint=hint, where=FLAG))


def _with_kernels(
    base: Calibration | None, found: tuple[MeasuredKernel, ...], cluster: Cluster, path: Path
) -> Calibration:
    """Return a calibration with a trace's kernels replacing those of the same kind and dtype."""
    kept = base or Calibration(kind=cluster.device.kind, device_name="", devices=cluster.gpus, date="")
    known = {(one.kind, one.dtype) for one in found}
    others = tuple(one for one in kept.kernels if (one.kind, one.dtype) not in known)
    return replace(kept, kernels=(*others, *found), origin=str(path), longer={}, slower=1.0)


def _by_kind(
    path: Path, trace: ReadTrace, job: Job, kept: Calibration, cluster: Cluster, report: Reporter
) -> TraceCalibration:
    """Return the calibration with a factor for each kind of kernel, and one for the rest of the step.

    With these factors the forecast of the traced step equals its measured time.
    """
    layout, profile = PlannedLayout.of(job), _profile(job, cluster, report)
    nodes = max(1, layout.world_size // cluster.gpus)
    cluster = replace(cluster, gpus=layout.world_size // nodes, nodes=nodes)
    timer = Timer(profile, cluster, rates_of(cluster, job.precision, kept))
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
        and seconds / MOST < measured[kind] < seconds * MOST
        and not (kind == HOST and trace.on_device)  # the host runs ahead of a GPU
    }
    by_kind = replace(kept, longer=longer)
    again_s = Timer(profile, cluster, rates_of(cluster, job.precision, by_kind)).step(layout).step_s
    return TraceCalibration(
        path=path,
        calibration=replace(by_kind, slower=trace.step_s / again_s),
        layout=layout,
        forecast_step_s=timer.step(layout).step_s,
        measured_step_s=trace.step_s,
    )


def _profile(job: Job, cluster: Cluster, report: Reporter) -> Profile:
    """Return the profile of the traced model with its inputs."""
    run, layout = job.run, job.layout
    image = None
    if not run.seq_len:  # the inputs of other models depend on the data
        from zerofit.app.job.requests import as_request, input_option
        from zerofit.app.job.resolve import resolve_job

        image = input_option(resolve_job(as_request(run)).inputs)
    degrees = Degrees(layout.tp, layout.pp, layout.sp, layout.ep).beside_plain()
    request = ProfileRequest.of_run(run, job.precision, cluster.accelerator, image, degrees)
    return get_profile(request, report)[0]
