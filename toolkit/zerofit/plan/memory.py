"""How much memory a layout needs: the peak of a training step and of the start, from a stored profile.

What is alive when is taken from DeepSpeed 0.19.8's source and torch's optimizers, term by term; nothing is fitted.
Left out: kernels' scratch, what the collectives' library and the device's context hold, and the allocator's rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from zerofit.plan.backward import LiveMemory, backward_moments, upper
from zerofit.plan.initialization import start_moments
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.optimizer_step import step_moments
from zerofit.plan.persistent import PersistentMemory, overlap_in_partition, shards, standing
from zerofit.plan.pipeline import idle, in_flight, stage_bounds
from zerofit.plan.timeline import Point, StageTimeline, timeline
from zerofit.plan.zero3_gather import gathered_at_once, gathered_in_forward
from zerofit.spec.precision import ELEMENT_BYTES
from zerofit.spec.profile import Profile, setting

# all of a layout that the moments of a step depend on
_WITHOUT_MICRO_BATCH = tuple(name for name in PlannedLayout.__dataclass_fields__ if name != "micro_batch")
_key_of = attrgetter(*_WITHOUT_MICRO_BATCH)


_NOTHING: Point = (0.0, 0.0)


class _Moment(NamedTuple):
    """What is alive on the device at one moment (on "cpu": in all)."""

    phase: str
    fixed: float  # bytes in all at micro batch 0
    slope: float  # bytes a sample
    activations: Point
    kinds: dict[str, int]  # the rest


class _Tables(NamedTuple):
    """All that a layout's forecast needs besides its micro batch."""

    moments: tuple[_Moment, ...]
    static_bytes: int
    host_bytes: int
    nvme_bytes: int


def forecast(profile: Profile, layout: PlannedLayout, device: str = "cuda") -> LayoutMemory:
    """The memory of the rank that needs most. Raises KeyError for a setting that the profile does not have."""
    return Forecaster(profile, device).memory(layout)


class Forecaster:
    """Forecasts of many layouts for one model on one kind of device, "cpu" or "cuda".

    On "cpu" host and device are one, and the optimizer is torch's; on "cuda" it is DeepSpeed's FusedAdam, or its
    CPUAdam where the states are on the host.
    """

    def __init__(self, profile: Profile, device: str = "cuda"):
        self.profile, self.device = profile, device
        self._tables: dict[tuple, tuple[_Tables, ...]] = {}
        matrices = {layer.name: max(layer.matrices, default=0) for layer in profile.layers}
        self._tied = sum(matrices.get(layer.tied_to, 0) for layer in profile.layers if layer.tied_to)
        self._timeline = cache(lambda key, bounds: timeline(profile, key, bounds))

    def memory(self, layout: PlannedLayout) -> LayoutMemory:
        """Memory of the pipeline stage that needs most."""
        key = _key_of(layout)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = tuple(self._made(layout))
        samples = layout.micro_batch
        found = [max((m.fixed + m.slope * samples, n) for n, m in enumerate(table.moments)) for table in tables]
        stage = max(range(len(found)), key=lambda n: found[n][0])
        table = tables[stage]
        return _memory(table, table.moments[found[stage][1]], samples)

    def _made(self, layout: PlannedLayout) -> Iterator[_Tables]:
        key = setting(layout.precision, layout.checkpointing, layout.tp, layout.sp)
        if layout.pp == 1:
            yield self._table(self._timeline(key, None), layout, [(layout, _NOTHING)], self._waiting())
            return
        bounds = stage_bounds(self.profile, layout.pp)
        for stage in _telling(bounds):
            line = self._timeline(key, bounds[stage])
            yield self._table(line, layout, list(in_flight(line, layout, stage)), idle(line))

    def _waiting(self) -> Point:
        """A micro batch's samples outlast its backward, on the host."""
        return (0.0, self.profile.sample_bytes if self.device == "cpu" else 0.0)

    def _table(
        self, line: StageTimeline, layout: PlannedLayout, passes: list[tuple[PlannedLayout, Point]], between: Point
    ) -> _Tables:
        """`passes`: kinds of forward and backward, each with what the pipeline holds besides its micro batch's own."""
        stands = standing(line, layout, self.device, self._tied)
        moments = []
        for one, more in passes:
            for held in upper(_forward_moments(line, one, self.device)):
                moments.append(_moment("forward", held, stands, more, self.device))
            for held in backward_moments(line, one, self.device):
                moments.append(_moment("backward", held, stands, between if held.after else more, self.device))
        host = stands.momentary
        for step in step_moments(line, layout, self.device):
            held = LiveMemory(_NOTHING, gradients=step.gradients, temporaries=step.temporaries)
            moments.append(_moment("step", held, stands, between, self.device, step.host))
            host = max(host, step.host)
        for kinds in start_moments(line, layout, self.device, self.profile.model_type is not None):
            kinds = {"buffers of the model": line.buffers_bytes, **kinds}
            moments.append(_Moment("init", sum(kinds.values()), 0.0, _NOTHING, kinds))
        static = sum(stands.device.values()) + (sum(stands.host.values()) if self.device == "cpu" else 0)
        return _Tables(_upper(moments), static, sum(stands.host.values()) + host, stands.nvme)


def _forward_moments(line: StageTimeline, layout: PlannedLayout, device: str) -> Iterator[LiveMemory]:
    """Forward of the micro batch that finds most: a later one, where gradients accumulate."""
    element = ELEMENT_BYTES[layout.precision]
    gradients = buckets = 0
    if layout.accumulation > 1 and layout.zero_stage < 2:
        gradients = element * line.parameters
        buckets = element * layout.bucket * (1 + layout.overlap) if layout.zero_stage == 1 else 0
    if layout.accumulation > 1 and layout.zero_stage == 2 and layout.offload_optimizer == "none":
        gradients = element * overlap_in_partition(line, shards(layout))
    partitioned = layout.zero_stage == 3
    here = replace(layout, offload_param="none") if device == "cpu" else layout  # the host's memory is the device's
    gathered = gathered_in_forward(line, here) if partitioned else [0] * len(line.forward)
    copied = gathered_at_once(line, here, device) if partitioned else [0] * len(line.forward)
    for (_, before, points), whole, copy in zip(line.forward, gathered, copied, strict=True):
        for point in points:
            yield LiveMemory(point, gradients, buckets, whole)
        yield LiveMemory(before, gradients, buckets, whole, copy)


def _telling(bounds: tuple[tuple[int, int], ...]) -> list[int]:
    """Stages to look at: the first, the last, and of the others the first with each number of layers."""
    seen, stages = set(), []
    for stage, (first, last) in enumerate(bounds):
        kind = (last - first, stage == 0, stage == len(bounds) - 1)
        if kind not in seen:
            seen.add(kind)
            stages.append(stage)
    return stages


def _moment(phase: str, held: LiveMemory, stands: PersistentMemory, more: Point, device: str, host: int = 0) -> _Moment:
    kinds = dict(stands.device)
    parts = {
        "gradients": held.gradients,
        "communication buckets": held.buckets,
        "gathered parameters": held.gathered,
        "temporaries": held.temporaries,
    }
    if device == "cpu":
        parts["temporaries"] += host
        kinds = _added(kinds, stands.host)
    kinds = _added(kinds, parts)
    activations = (held.activations[0] + more[0], held.activations[1] + more[1])
    return _Moment(phase, sum(kinds.values()) + activations[0], activations[1], activations, kinds)


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


def _upper(moments: Iterable[_Moment]) -> tuple[_Moment, ...]:
    """Without those that another one exceeds at every micro batch."""
    best: list[_Moment] = []
    for one in sorted(moments, key=lambda m: (m.slope, m.fixed), reverse=True):
        if not best or one.fixed + one.slope > best[-1].fixed + best[-1].slope:
            best.append(one)
    return tuple(best)


def _memory(table: _Tables, moment: _Moment, samples: int) -> LayoutMemory:
    activations = round(moment.activations[0] + moment.activations[1] * samples)
    breakdown = {kind: size for kind, size in moment.kinds.items() if size}
    if activations:
        breakdown["activations"] = activations
    return LayoutMemory(
        peak_bytes=sum(breakdown.values()),
        peak_phase=moment.phase,
        static_bytes=table.static_bytes,
        host_bytes=table.host_bytes,
        nvme_bytes=table.nvme_bytes,
        breakdown=breakdown,
    )
