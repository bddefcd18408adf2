"""The memory that a layout needs: the peak of a training step and of the start, from a stored profile.

What is alive when is taken from DeepSpeed 0.19.8's source and torch's optimizers, term by term; nothing is fitted.
Left out: kernels' scratch, what the collectives' library and the device's context hold, and the allocator's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from zerofit.plan.backward import LiveMemory, backward_moments, replayed, upper
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.persistent import PersistentMemory, add_kinds, overlap_in_partition, persistent_memory
from zerofit.plan.pipeline import idle, in_flight, most_in_flight, stage_bounds
from zerofit.plan.timeline import NOTHING, Point, StageTimeline, add, timeline
from zerofit.plan.transient import init_moments, step_moments
from zerofit.plan.zero3_gather import gathered_at_once, gathered_in_forward
from zerofit.spec.overhead import pinned_bytes
from zerofit.spec.profile import Profile

# all of a layout that the moments of a step depend on
_WITHOUT_MICRO_BATCH = tuple(name for name in PlannedLayout.__dataclass_fields__ if name != "micro_batch")
_key_of = attrgetter(*_WITHOUT_MICRO_BATCH)


class _Moment(NamedTuple):
    """The bytes on the device (on "cpu": on the host, too) at one moment."""

    phase: str
    fixed: float  # in all at micro batch 0
    slope: float  # per sample
    activations: Point
    kinds: dict[str, int]  # the rest

    def line(self) -> tuple[float, float]:
        """Return the bytes per sample, and those that do not grow with the micro batch."""
        return self.slope, self.fixed


class LayerMoment(NamedTuple):
    """The moment of a phase at which most is alive in one layer."""

    phase: str  # "forward", "backward" or "step"
    layer: int  # of the stage's, from 0; -1: in none
    bytes: dict[str, int]  # by kind


class _StageMoments(NamedTuple):
    """The forecast of a pipeline stage, for any micro batch."""

    moments: tuple[_Moment, ...]
    static_bytes: int
    host_bytes: int
    nvme_bytes: int
    on_host: tuple[Point, ...]  # activations of all micro batches in flight, page-locked each by itself

    def host_at(self, samples: int) -> int:
        """Return the bytes on the host at a micro batch."""
        return self.host_bytes + sum(pinned_bytes(round(a + b * samples)) for a, b in self.on_host)


def forecast(profile: Profile, layout: PlannedLayout, device: str = "cuda") -> LayoutMemory:
    """Return the memory of the rank that needs most. Raises KeyError for a setting that the profile does not have."""
    return Forecaster(profile, device).memory(layout)


class Forecaster:
    """Forecasts of many layouts for one model on one kind of device, "cpu" or "cuda".

    On "cpu" host and device are one, and the optimizer is torch's; on "cuda" it is DeepSpeed's FusedAdam, or its
    CPUAdam where the states are on the host. `workspace_bytes` are those of a thread's matrix products: forward's and
    backward's have one each (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    def __init__(self, profile: Profile, device: str = "cuda", workspace_bytes: int = 0):
        self.profile, self.device = profile, device
        self._workspaces = {"workspaces": 2 * workspace_bytes}
        self._stages: dict[tuple, tuple[_StageMoments, ...]] = {}
        matrices = {layer.name: max(layer.matrices + layer.frozen, default=0) for layer in profile.layers}
        self._tied = sum(matrices.get(layer.tied_to, 0) for layer in profile.layers if layer.tied_to)
        self._timeline = cache(lambda key, bounds: timeline(profile, key, bounds))

    def memory(self, layout: PlannedLayout) -> LayoutMemory:
        """Return the memory of the pipeline stage that needs most."""
        key = _key_of(layout)
        stages = self._stages.get(key)
        if stages is None:
            stages = self._stages[key] = tuple(self._all_stages(layout))
        samples = layout.micro_batch
        peaks = [max((m.fixed + m.slope * samples, n) for n, m in enumerate(stage.moments)) for stage in stages]
        largest = max(range(len(peaks)), key=lambda n: peaks[n][0])
        stage = stages[largest]
        moment = stage.moments[peaks[largest][1]]
        activations = round(moment.activations[0] + moment.activations[1] * samples)
        breakdown = {kind: size for kind, size in moment.kinds.items() if size}
        if activations:
            breakdown["activations"] = activations
        return LayoutMemory(
            peak_bytes=sum(breakdown.values()),
            peak_phase=moment.phase,
            static_bytes=stage.static_bytes,
            host_bytes=max(one.host_at(samples) for one in stages),
            nvme_bytes=stage.nvme_bytes,
            breakdown=breakdown,
        )

    def along(self, layout: PlannedLayout, stage: int = 0) -> list[LayerMoment]:
        """Return when most is alive in layers of a pipeline stage, and in its step; of equal layers in a few.

        Of several micro batches it is the one that finds most. Raises KeyError as `memory`.
        """
        bounds = stage_bounds(self.profile, layout.pp)[stage] if layout.pp > 1 else None
        line, passes, between = self._passes(layout, bounds, stage)
        persistent = persistent_memory(line, layout, self.device, self._tied)
        found: dict[tuple[str, int], dict[str, int]] = {}

        def note(phase: str, live: LiveMemory, more: Point) -> None:
            moment, key = self._moment(phase, live, persistent, more), (phase, live.layer)
            activations = round(moment.activations[0] + moment.activations[1] * layout.micro_batch)
            kinds = {kind: size for kind, size in {**moment.kinds, "activations": activations}.items() if size}
            found[key] = max(found.get(key, {}), kinds, key=lambda one: sum(one.values()))

        for one, more in passes:
            for live in _forward_moments(line, one, self.device):
                note("forward", live, more)
            for live in replayed(line, one, self.device):
                note("backward", live, between if live.after else more)
        for step in step_moments(line, layout, self.device):
            temporaries = step.temporaries + (step.host if self.device == "cpu" else 0)
            note("step", LiveMemory(NOTHING, gradients=step.gradients, temporaries=temporaries), between)
        return [LayerMoment(phase, layer, kinds) for (phase, layer), kinds in found.items()]

    def _all_stages(self, layout: PlannedLayout) -> Iterator[_StageMoments]:
        if layout.pp == 1:
            yield self._stage(layout, 0, *self._passes(layout, None, 0))
            return
        bounds = stage_bounds(self.profile, layout.pp)
        for stage in _distinct_stages(bounds):
            yield self._stage(layout, stage, *self._passes(layout, bounds[stage], stage))

    def _passes(
        self, layout: PlannedLayout, bounds: tuple[int, int] | None, stage: int
    ) -> tuple[StageTimeline, list[tuple[PlannedLayout, Point]], Point]:
        """Return a stage's layers, its kinds of passes with what is in flight in each, and what stays between steps."""
        line = self._timeline(self.profile.key_of(layout.setting, layout.zero_stage), bounds)
        if bounds is not None:
            return line, list(in_flight(line, layout, stage)), idle(line)
        # a micro batch's samples outlast its backward, on the host
        return line, [(layout, NOTHING)], (0.0, self.profile.sample_bytes if self.device == "cpu" else 0.0)

    def _stage(
        self,
        layout: PlannedLayout,
        stage: int,
        line: StageTimeline,
        passes: list[tuple[PlannedLayout, Point]],
        between: Point,
    ) -> _StageMoments:
        """Forecast a stage; `passes`: kinds of forward and backward, each with what the pipeline has in flight."""
        persistent = persistent_memory(line, layout, self.device, self._tied)
        moments = []
        for one, more in passes:
            forward = reversed(list(_forward_moments(line, one, self.device)))
            for live in upper(forward, LiveMemory.line):
                moments.append(self._moment("forward", live, persistent, more))
            for live in backward_moments(line, one, self.device):
                moments.append(self._moment("backward", live, persistent, between if live.after else more))
        host = persistent.momentary
        for step in step_moments(line, layout, self.device):
            temporaries = step.temporaries + (step.host if self.device == "cpu" else 0)
            live = LiveMemory(NOTHING, gradients=step.gradients, temporaries=temporaries)
            moments.append(self._moment("step", live, persistent, between))
            host = max(host, step.host)
        for kinds in init_moments(line, layout, self.device, self.profile.model_type is not None):
            kinds = {"buffers of the model": line.buffers_bytes, **kinds}
            moments.append(_Moment("init", sum(kinds.values()), 0.0, NOTHING, kinds))
        on_host = sum(persistent.host.values())
        static = sum(persistent.device.values()) + (on_host if self.device == "cpu" else 0)
        kept = line.on_host * most_in_flight(layout, stage)
        return _StageMoments(tuple(upper(moments, _Moment.line)), static, on_host + host, persistent.nvme, kept)

    def _moment(self, phase: str, live: LiveMemory, persistent: PersistentMemory, more: Point) -> _Moment:
        kinds = add_kinds(persistent.device, persistent.host) if self.device == "cpu" else persistent.device
        parts = {
            **self._workspaces,
            "gradients": live.gradients,
            "communication buckets": live.buckets,
            "gathered parameters": live.gathered,
            "temporaries": live.temporaries,
        }
        kinds, activations = add_kinds(kinds, parts), add(live.activations, more)
        return _Moment(phase, sum(kinds.values()) + activations[0], activations[1], activations, kinds)


def _forward_moments(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[LiveMemory]:
    """Yield the moments of the forward that finds most: a later micro batch's, where gradients accumulate."""
    gradients = buckets = 0
    if layout.accumulation > 1 and layout.zero_stage < 2:
        gradients = layout.element_bytes * line.parameters
        buckets = layout.element_bytes * layout.bucket * (1 + layout.overlap) if layout.zero_stage == 1 else 0
    if layout.accumulation > 1 and layout.zero_stage == 2 and layout.offload_optimizer == "none":
        gradients = layout.element_bytes * overlap_in_partition(line, layout.zero_ranks)
    gathered = copied = [0] * len(line.forward)
    if layout.zero_stage == 3:
        here = replace(layout, offload_param="none") if device == "cpu" else layout  # the host's memory is the device's
        gathered, copied = gathered_in_forward(line, here), gathered_at_once(line, here, device)
    for (layer, before, points), whole, copy in zip(line.forward, gathered, copied, strict=True):
        for point in points:
            yield LiveMemory(point, gradients, buckets, whole, layer=layer)
        yield LiveMemory(before, gradients, buckets, whole, copy, layer=layer)


def _distinct_stages(bounds: tuple[tuple[int, int], ...]) -> list[int]:
    """Choose the stages to forecast: the first, the last, and of the others the first with each number of layers."""
    kinds: dict[tuple, int] = {}
    for stage, (first, last) in enumerate(bounds):
        kinds.setdefault((last - first, stage == 0, stage == len(bounds) - 1), stage)
    return list(kinds.values())
