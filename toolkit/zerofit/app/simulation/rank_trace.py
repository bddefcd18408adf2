"""Traces of a simulated rank's step, with forecast times: of a script's ops, or of a run's phases."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from zerofit.app.job.requests import input_option
from zerofit.app.planning.output_files import about
from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.inputs import ImageInputs, Inputs, TableInputs
from zerofit.plan.kernels import RankGroup, collective_s, kernel_s
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.software import Software
from zerofit.plan.step_timeline import LAUNCHES, Span, StepTimeline, step_timeline
from zerofit.plan.step_trace import MemorySample, step_trace
from zerofit.plan.time import Timer
from zerofit.simulate.forecast.result import Simulation
from zerofit.simulate.ops.issued import COPY, HOOKS, HOST_STEP, ON_HOST, STEP, IssuedWait, IssuedWork
from zerofit.simulate.record import STEPS, MemoryPoint, RankRecord
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import read_calibration
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.run_folder import Job

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_OPS = {  # part of c10d's op name -> collective; the first match counts
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
_SENT = "send"  # all other collectives send a tensor from one rank to others


def trace_of_script(record: RankRecord, rank: int, cluster: Cluster) -> dict[str, object]:
    """Return the trace of the last step of a simulated script's rank.

    Memory changes at the time when the host allocates it.
    """
    assert record.script
    clocks = _Clocks(record.issued, record.script.precision, cluster)
    spans = tuple(sorted([*clocks.spans, *clocks.launches], key=lambda span: (span.stream, span.start_s)))
    timeline = StepTimeline(spans=spans, step_s=clocks.end_s)
    machine = {"gpu": cluster.device.kind, "gpus": cluster.gpus, "nodes": cluster.nodes}
    about = {"forecast": f"a step of {record.script.name}", "model": record.script.model, **machine}
    return step_trace(timeline, _memory(record.timeline, clocks.allocated), {0: rank}, about)


def script_step_s(record: RankRecord, cluster: Cluster) -> float | None:
    """Return a script's forecast seconds of the last step; None on a CPU without calibration."""
    if cluster.on_cpu and read_calibration(cluster.device.kind) is None:
        return None
    assert record.script
    return _Clocks(record.issued, record.script.precision, cluster).end_s


def _memory(points: tuple[MemoryPoint, ...], allocated: list[tuple[int, float]]) -> Iterator[MemorySample]:
    moments = [t for t, _ in allocated]
    for point in points:
        place = bisect_left(moments, point.t)
        if moments and moments[0] <= point.t and place < len(allocated):
            yield MemorySample(0, allocated[place][1], point.bytes)


# How ops get their times. A simulated script has an order of issued work, but no times. The host has a clock, and so
# has each stream:
#
#   host      |launch|launch|launch|         |wait..........|launch|      issues work, and waits where the script waits
#   compute          |kernel.......|kernel..................|      |kernel|
#   NCCL                           |all-gather..............|
#
# Work on a stream starts at the latest of: the host's clock after the launch, the end of the stream's last work, and
# the end of work that the script makes it wait for. Its length is the forecast of `plan.kernels`. On
# a CPU the host computes itself, so each piece of work also moves the host's clock.


class _Clocks:
    """The clocks of the host and of each stream, after all work was issued in order."""

    def __init__(self, issued: Sequence[IssuedWork | IssuedWait], precision: str, cluster: Cluster):
        """`precision`: of the script, such as "bf16" or "bf16 autocast"."""
        self._cluster, self._precision = cluster, precision.split()[0]
        calibration = read_calibration(cluster.device.kind)
        self._rates = {name: rates_of(cluster, name, calibration) for name in ELEMENT_BYTES}
        self._usual = self._rates[self._precision]
        self.host_s, self.spans = 0.0, list[Span]()
        self.launches: list[Span] = []  # host spans, merged while uninterrupted
        self.allocated: list[tuple[int, float]] = []  # number of allocations so far, host time
        self._done: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)  # index and end of a stream's work
        self._free: defaultdict[int, float] = defaultdict(float)  # earliest start of a stream's next work
        self._forwards, self._phase = 0, ""
        self._names: dict[int, str] = {0: "compute"}
        for place, work in enumerate(issued):
            self._take(place, work)

    @property
    def end_s(self) -> float:
        return max([self.host_s, *(done[-1][1] for done in self._done.values() if done)])

    def _take(self, place: int, work: IssuedWork | IssuedWait) -> None:
        """Schedule the next entry of `RankRecord.issued`: work, or a wait for work.

        `place`: the entry's index.
        """
        if isinstance(work, IssuedWait):
            self._wait(work)
            return
        if work.phase != self._phase:
            self._phase, self._forwards = work.phase, self._forwards + (work.phase == "forward")
        self.allocated.append((work.t, self.host_s))
        if work.kind == HOOKS:
            self._issue(work, work.count * self._usual.hook_s)
        elif work.kind in (HOST_STEP, ON_HOST):
            kind, moved = (work.kernel.kind, work.kernel.moved_bytes.fixed) if work.kernel else (STEP, work.bytes)
            # All ranks of the host step at the same time, and share its memory bandwidth.
            seconds = moved * self._cluster.gpus / self._usual.host
            self._span(work, "host", kind, self.host_s, seconds)
            self.host_s += seconds
        else:
            self._run(place, work)

    def _run(self, place: int, work: IssuedWork) -> None:
        rates = self._usual
        self._issue(work, rates.launch_s if work.inside else rates.engine_launch_s)
        waits = [self.host_s, self._free[work.stream], self._end(work.stream)]
        if work.behind is not None:
            waits += [self._free[work.behind], self._end(work.behind)]
        kind, seconds = self._kind_and_seconds(work)
        end_s = max(waits) + seconds
        if seconds:  # a single rank sends nothing
            self._span(work, self._name(work), kind, max(waits), seconds)
        self._done[work.stream].append((place, end_s))
        if not rates.ahead and work.stream >= 0:
            self.host_s = end_s

    def _kind_and_seconds(self, work: IssuedWork) -> tuple[str, float]:
        rates = self._usual
        if work.kind == COPY:
            return COPY, work.bytes / rates.host_copy(work.pinned)
        if work.kind == STEP:
            return STEP, work.bytes / rates.adam
        if work.kernel is None:
            assert work.ranks
            op = next((ours for name, ours in _OPS.items() if name in work.kind), _SENT)
            group = RankGroup(work.ranks.size, work.ranks.per_node)
            return op.replace("_", "-"), collective_s(op, work.bytes, 1, group, rates)
        moved = work.kernel.moved_bytes.fixed
        if not work.inside and not work.kernel.flops.fixed:  # long passes over memory by an engine or an optimizer
            return work.kernel.kind, moved / rates.streaming
        return work.kernel.kind, kernel_s(
            work.kernel, 1, self._rates[_PRECISIONS.get(work.kernel.dtype, self._precision)]
        )

    def _wait(self, work: IssuedWait) -> None:
        on = list(self._done) if work.on is None else [work.on]
        until_s = max((self._end(stream, work.before) for stream in on), default=0.0)
        if work.stream is None or not self._usual.ahead:
            self.host_s = max(self.host_s, until_s)
        else:
            self._free[work.stream] = max(self._free[work.stream], until_s)

    def _end(self, stream: int, before: int | None = None) -> float:
        """Return when a stream finishes its work so far."""
        # With `before`, count only work issued before this index.
        done = self._done[stream]
        last = len(done) if before is None else bisect_left(done, (before, 0.0))
        return done[last - 1][1] if last else 0.0

    def _issue(self, work: IssuedWork, seconds: float) -> None:
        """Advance the host's clock by the `seconds` that issuing takes."""
        # Consecutive work of a module is one span.
        start_s, self.host_s = self.host_s, self.host_s + seconds
        if not seconds:
            return
        last = self.launches[-1] if self.launches else None
        if last and (last.end_s, last.phase, last.module) == (start_s, work.phase, work.module):
            self.launches[-1] = last._replace(end_s=self.host_s)
            return
        self.launches.append(self._made(work, "host", LAUNCHES[work.kind == HOOKS], start_s, self.host_s))

    def _span(self, work: IssuedWork, stream: str, kind: str, start_s: float, seconds: float) -> None:
        self.spans.append(self._made(work, stream, kind, start_s, start_s + seconds))

    def _made(self, work: IssuedWork, stream: str, kind: str, start_s: float, end_s: float) -> Span:
        moved, flops, kernel = work.bytes, 0.0, work.kernel
        if kind in LAUNCHES:
            moved = 0.0
        elif kernel:
            moved, flops = kernel.moved_bytes.fixed, kernel.flops.fixed
        micro_batch = -1 if work.phase == "step" else self._forwards - 1
        return Span(0, stream, work.phase, micro_batch, work.module, kind, start_s, end_s, moved, flops)

    def _name(self, work: IssuedWork) -> str:
        if work.stream not in self._names:
            name = f"collectives of {work.ranks.size} ranks" if work.ranks else f"stream {work.stream}"
            same = sum(known.startswith(name) for known in self._names.values())
            self._names[work.stream] = f"{name} ({same + 1})" if same else name
        return self._names[work.stream]


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
