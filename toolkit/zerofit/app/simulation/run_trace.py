"""The trace of a simulated rank's step for `zerofit simulate --trace`.

`zerofit plan` forecasts the times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from zerofit.app.job.requests import input_option
from zerofit.app.planning.output_files import about
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.inputs import ImageInputs, Inputs, TableInputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.software import Software
from zerofit.plan.step_timeline import StepTimeline, step_timeline
from zerofit.plan.step_trace import MemorySample, step_trace
from zerofit.plan.time import Timer
from zerofit.simulate.forecast.result import Simulation
from zerofit.simulate.record import STEPS, MemoryPoint
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.run_folder import Job


def trace_of_simulation(
    simulation: Simulation, job: Job, inputs: Inputs, cluster: Cluster, report: Reporter
) -> dict[str, object]:
    """Return the trace of the rank's last step: times by `zerofit plan`, memory as simulated.

    Raises UserError if the model cannot be profiled.
    """
    layout = PlannedLayout.of(job)
    image = input_option(inputs) if isinstance(inputs, ImageInputs | TableInputs) else None
    request = ProfileRequest.of_job(job, cluster.accelerator, image)
    request = replace(request, checkpointings=(job.run.activation_checkpointing,))
    profile = get_profile(request, report)[0]
    calibration, software = read_calibration(cluster.device.kind), Software.of(dict(job.run))
    timer = Timer(profile, cluster, rates_of(cluster, job.precision, calibration, software))
    timeline = step_timeline(profile, timer, layout)
    stage = simulation.rank // (layout.world_size // layout.pp)
    memory = list(simulated_memory(timeline, stage, simulation.timeline))
    return step_trace(timeline, memory, {stage: simulation.rank}, about(profile, cluster, layout))


def simulated_memory(timeline: StepTimeline, stage: int, points: tuple[MemoryPoint, ...]) -> Iterator[MemorySample]:
    """Yield the last simulated step's memory, spread evenly over the timeline's phases.

    A simulation has no times, so its phases get times from the timeline. A forward or backward gets the times of the
    same micro batch. DeepSpeed does nothing in `step` before the last micro batch. So only the last `step` of the
    simulation gets times: those of the timeline's `step`.
    """
    last = [point for point in points if point.step == points[-1].step]
    phases = [(name, list(of)) for name, of in groupby(last, key=lambda point: point.phase)]
    spans = sorted((span for span in timeline.spans if span.stage == stage), key=lambda span: span.start_s)
    drawn = [(name, list(of)) for name, of in groupby(spans, key=lambda span: span.phase)]
    for name in STEPS:
        mine = [of for phase, of in phases if phase == name]
        times = [(min(s.start_s for s in of), max(s.end_s for s in of)) for phase, of in drawn if phase == name]
        # Either side may have more phases of a name. The last ones of both belong together.
        for moments, (start_s, end_s) in zip(mine[-len(times) :], times[-len(mine) :], strict=True):
            for n, point in enumerate(moments):
                yield MemorySample(stage, start_s + n / len(moments) * (end_s - start_s), point.bytes)
