"""Forecast a layout's peak memory, at start-up and in a step, from a stored profile.

The terms follow the source of DeepSpeed 0.19.8 and torch's optimizers. Nothing is fitted. Kernels' scratch memory,
the communication library, the device's context and the allocator's rounding are not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from zerofit.features.engines import ENGINES, Engine
from zerofit.plan.backward import LiveMemory, backward_moments, replayed, upper
from zerofit.plan.fsdp2 import block_init, block_moments, block_persistent, block_step
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.persistent import (
    PersistentMemory,
    add_kinds,
    overlap_in_partition,
    persistent_memory,
    quantized_at_start,
)
from zerofit.plan.pipeline import DIRECTIONS, Direction, Pass, in_flight, most_in_flight, stage_parts
from zerofit.plan.timeline import NOTHING, Point, StageTimeline, add, timeline
from zerofit.plan.transient import StepMemory, init_moments, step_moments
from zerofit.plan.zero3_gather import gathered_at_once, gathered_in_forward
from zerofit.spec.named_code import names_callable
from zerofit.spec.overhead import CPU_PROCESS_BYTES, CPU_PROCESS_HIGH_BYTES, pinned_bytes
from zerofit.spec.profile import SINGLE, Profile

# all attributes of a layout on which the moments of a step depend
_WITHOUT_MICRO_BATCH = tuple(name for name in PlannedLayout.__dataclass_fields__ if name != "micro_batch")
_key_of = attrgetter(*_WITHOUT_MICRO_BATCH)


class _Moment(NamedTuple):
    """The bytes in use on the device at one moment. For the device "cpu" this is host memory."""

    phase: str
    fixed: float  # all bytes without any samples
    slope: float  # per sample
    activations: Point
    kinds: dict[str, int]  # bytes of all other kinds

    def line(self) -> tuple[float, float]:
        return self.slope, self.fixed


class LayerMoment(NamedTuple):
    """The largest memory of one layer in a phase."""

    phase: str  # "forward", "backward" or "step"
    layer: int  # index in the stage; -1: none
    bytes: dict[str, int]  # by kind


class _StageMoments(NamedTuple):
    moments: tuple[_Moment, ...]
    static_bytes: int
    host_bytes: int
    nvme_bytes: int
    on_host: tuple[Point, ...]  # activations of all micro batches in flight, each page-locked by itself
    large: tuple[int, tuple[Point, ...]]  # the largest gradient, buckets and temporaries; the largest activations
    stepped: tuple[Point, ...]  # live bytes at moments of the step, plus the block that they allocate

    def host_at(self, samples: int) -> int:
        return self.host_bytes + sum(pinned_bytes(round(a + b * samples)) for a, b in self.on_host)

    def large_at(self, samples: int, peak_bytes: int) -> int:
        """Return the bytes of large blocks that a step allocates and frees."""
        fixed, activations = self.large
        # in the passes, the largest gradient, buckets, temporaries and activation; in the optimizer's step, what its
        # new block needs beyond the peak (it flattens gradients when no activation is alive)
        passes = fixed + round(max((a + b * samples for a, b in activations), default=0))
        return max(passes, round(max(a + b * samples for a, b in self.stepped)) - peak_bytes)


def forecast(profile: Profile, layout: PlannedLayout, device: str = "cuda") -> LayoutMemory:
    """Return the memory of the rank that needs most.

    Raises KeyError if the profile was not traced for a setting of the layout (e.g. its tensor parallel degree).
    """
    return Forecaster(profile, device).memory(layout)


# The peak of a rank is the largest sum, over all moments of its life, of
#
#     persistent    parameters, master weights, optimizer states, buffers      (persistent.py)
#     activations   tensors that forward saved and backward has not freed      (timeline.py, backward.py)
#     gathered      ZeRO-3's full parameters of the layers in flight           (zero3_gather.py)
#     gradients     gradients that wait, are in buckets, or are being reduced  (backward.py)
#     step, init    the optimizer's temporaries, and making the engine         (transient.py)
#
# Activations are a line in the micro batch: a fixed part and a part for each sample. All other terms are fixed. So each
# moment is a line, the peak is the upper envelope of these lines, and one forecast serves every micro batch. Moments
# below the envelope are dropped (`upper`).
#
# A search needs the largest moment only (`memory`). The timeline of a step needs every layer's (`along`).
class Forecaster:
    """Forecasts the memory of many layouts, for one model on "cpu" or "cuda".

    On "cpu" the host is the device, and the optimizer is torch's. On "cuda" the optimizer is DeepSpeed's FusedAdam,
    or DeepSpeed's CPUAdam if the states are on the host. `workspace_bytes`: workspace for the matmuls of one
    thread. Forward and backward run in two threads with a workspace each (aten/src/ATen/cuda/CublasHandlePool.cpp),
    unless the engine runs both in one thread. `engine`: the engine whose model code was traced for the profile.
    """

    def __init__(self, profile: Profile, device: str = "cuda", workspace_bytes: int = 0, engine: Engine = "deepspeed"):
        self.profile, self.device = profile, device
        self._workspaces = {"workspaces": (1 if ENGINES[engine].single_thread else 2) * workspace_bytes}
        self._stages: dict[tuple, tuple[_StageMoments, ...]] = {}
        matrices = {layer.name: max(layer.matrices + layer.frozen, default=0) for layer in profile.layers}
        self._tied = sum(matrices.get(layer.tied_to, 0) for layer in profile.layers if layer.tied_to)
        self._built_in_parts = profile.model_type is not None  # transformers divides it at once at stage 3
        self._cpu_process_bytes = _cpu_process_bytes(profile)
        self._single = any(key.endswith(SINGLE) for key in profile.costs)
        self._engine_forecasters = {
            of: Forecaster(model, device, workspace_bytes, of) for of, model in profile.own_models.items()
        }

    def memory(self, layout: PlannedLayout) -> LayoutMemory:
        """Return the memory of the pipeline stage that needs the most memory."""
        if layout.engine in self._engine_forecasters:
            return self._engine_forecasters[layout.engine].memory(layout)
        key = (*_key_of(layout), self._single and layout.micro_batch == 1)
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
        peak_bytes = sum(breakdown.values())
        return LayoutMemory(
            peak_bytes=peak_bytes,
            peak_phase=moment.phase,
            static_bytes=stage.static_bytes,
            host_bytes=max(stage.host_at(samples) for stage in stages),
            nvme_bytes=stage.nvme_bytes,
            breakdown=breakdown,
            large_bytes=stage.large_at(samples, peak_bytes),
            more_communicators=self._more_communicators(layout),
            cpu_process_bytes=self._cpu_process_bytes,
        )

    def _more_communicators(self, layout: PlannedLayout) -> int:
        """Return the number of communicators besides those of the degrees."""
        # of the stages that share a tied matrix
        tied = bool(self._tied) and layout.pp > 1 and layout.schedule != "dualpipev"
        # of the first rank's full weights, which it sends before they are divided (engine.py, _broadcast_model);
        # transformers' models are already divided at that time
        broadcast = not self._built_in_parts and layout.zero_stage == 3 and layout.zero_ranks > 1
        return tied + broadcast

    def along(self, layout: PlannedLayout, stage: int = 0) -> list[LayerMoment]:
        """Return the peak memory of each layer of a pipeline stage, and of the step.

        The peaks are those of the micro batch with the most live bytes. If a stage has many equal layers, the result
        contains only a few of them. Raises KeyError as `memory` does.
        """
        if layout.engine in self._engine_forecasters:
            return self._engine_forecasters[layout.engine].along(layout, stage)
        parts = stage_parts(self.profile, layout)[stage] if layout.pp > 1 else None
        lines, passes, between = self._passes(layout, parts, stage)
        persistent = self._persistent(lines[0], layout)
        peaks: dict[tuple[str, int], dict[str, int]] = {}
        moments = chain(
            self._live_in_passes(layout, passes, between, every=True),
            (("step", self._live_in_step(step), between) for step in self._step(lines[0], layout)),
        )
        for phase, live, others in moments:
            moment, key = self._moment(phase, live, persistent, others), (phase, live.layer)
            activations = round(moment.activations[0] + moment.activations[1] * layout.micro_batch)
            kinds = {kind: size for kind, size in {**moment.kinds, "activations": activations}.items() if size}
            peaks[key] = max(peaks.get(key, {}), kinds, key=lambda sizes: sum(sizes.values()))
        return [LayerMoment(phase, layer, kinds) for (phase, layer), kinds in peaks.items()]

    def _all_stages(self, layout: PlannedLayout) -> Iterator[_StageMoments]:
        if layout.pp == 1:
            yield self._stage(layout, 0, *self._passes(layout, None, 0))
            return
        stages = stage_parts(self.profile, layout)
        runs = [run for run, layer in enumerate(self.profile.layers) for _ in range(layer.count)]
        for stage in _distinct_stages(stages, runs):
            yield self._stage(layout, stage, *self._passes(layout, stages[stage], stage))

    def _passes(
        self, layout: PlannedLayout, parts: tuple[tuple[int, int], ...] | None, stage: int
    ) -> tuple[list[StageTimeline], list[Pass], Point]:
        stage_of_costs = 0 if layout.by_layer else layout.zero_stage
        key = self.profile.key_of(layout.setting, stage_of_costs, layout.micro_batch)
        decay = layout.has_weight_decay
        lines = [timeline(self.profile, key, parts, part, decay) for part in range(len(parts or "."))]
        if parts is not None:
            return lines, *in_flight(lines, layout, stage)
        graded = lines[0].parameters if layout.accumulation > 1 else 0
        passes = [Pass(lines[0], direction, graded=graded) for direction in DIRECTIONS]
        # on the host, a micro batch's samples outlive its backward
        return lines, passes, (0.0, self.profile.sample_bytes if self.device == "cpu" else 0.0)

    def _stage(
        self, layout: PlannedLayout, stage: int, lines: list[StageTimeline], passes: list[Pass], between: Point
    ) -> _StageMoments:
        line = lines[0]
        persistent = self._persistent(line, layout)
        moments = []
        for direction, live, others in self._live_in_passes(layout, passes, between, every=False):
            moments.append(self._moment(direction, live, persistent, others))
        host, stepped = persistent.momentary, []
        for step in self._step(line, layout):
            moments.append(self._moment("step", self._live_in_step(step), persistent, between))
            stepped.append(add((step.flat + step.temporaries, 0.0), (moments[-1].fixed, moments[-1].slope)))
            host = max(host, step.host)
        if layout.by_layer:
            start_up = block_init(line, layout)
        else:
            start_up = init_moments(line, layout, self.device, self._built_in_parts)
        for kinds in start_up:
            buffers = line.buffers_bytes - line.quantized_bytes + quantized_at_start(line, layout)
            kinds = {"buffers of the model": buffers, **kinds}
            moments.append(_Moment("init", sum(kinds.values()), 0.0, NOTHING, kinds))
        on_host = sum(persistent.host.values())
        static = sum(persistent.device.values()) + (on_host if self.device == "cpu" else 0)
        counts = most_in_flight(layout, stage)
        offloaded = tuple(chain(*(line.on_host * count for line, count in zip(lines, counts, strict=True))))
        steps = [moment.kinds for moment in moments if moment.phase != "init"]
        most = [max(kinds.get(kind, 0) for kinds in steps) for kind in ("communication buckets", "temporaries")]
        twice = self._tied if layout.pp == 1 else 0  # both gradients of a tied matrix, before their sum
        large = (
            layout.element_bytes * (line.largest + twice) + sum(most),
            tuple(chain(*(line.blocks for line in lines))),
        )
        return _StageMoments(
            moments=tuple(upper(moments, _Moment.line)),
            static_bytes=static,
            host_bytes=on_host + host,
            nvme_bytes=persistent.nvme,
            on_host=offloaded,
            large=large,
            stepped=tuple(stepped),
        )

    def _persistent(self, line: StageTimeline, layout: PlannedLayout) -> PersistentMemory:
        if layout.by_layer:
            return block_persistent(line, layout)
        return persistent_memory(line, layout, self.device, self._tied)

    def _step(self, line: StageTimeline, layout: PlannedLayout) -> Iterator[StepMemory]:
        return block_step(line, layout) if layout.by_layer else step_moments(line, layout, self.device)

    def _live_in_passes(
        self, layout: PlannedLayout, passes: list[Pass], between: Point, *, every: bool
    ) -> Iterator[tuple[Direction, LiveMemory, Point]]:
        """Yield each moment: direction, live memory, live bytes of other micro batches.

        Without `every`, moments that are not the peak for any size of the micro batch may be left out.
        """
        if layout.by_layer:
            for direction, moments in zip(DIRECTIONS, block_moments(passes[0].line, layout), strict=True):
                for live in moments if every else upper(moments, LiveMemory.line):
                    yield direction, live, between
            return
        for kind in passes:
            if kind.direction == "backward":
                replay = replayed if every else backward_moments
                moments = replay(kind.line, layout, self.device, kind.graded)
            else:
                forward = list(_forward_moments(kind, layout, self.device))
                # reversed, so that the last of equal moments is kept
                moments = forward if every else upper(reversed(forward), LiveMemory.line)
            for live in moments:
                yield kind.direction, live, between if live.after else kind.others

    def _live_in_step(self, step: StepMemory) -> LiveMemory:
        temporaries = step.temporaries + (step.host if self.device == "cpu" else 0)
        return LiveMemory(NOTHING, gradients=step.gradients, temporaries=temporaries)

    def _moment(self, phase: str, live: LiveMemory, persistent: PersistentMemory, others: Point) -> _Moment:
        """Return a moment with all kinds of bytes. `others`: live bytes of other micro batches."""
        kinds = add_kinds(persistent.device, persistent.host) if self.device == "cpu" else persistent.device
        parts = {
            **self._workspaces,
            "gradients": live.gradients,
            "communication buckets": live.buckets,
            "gathered parameters": live.gathered,
            "temporaries": live.temporaries,
        }
        kinds, activations = add_kinds(kinds, parts), add(live.activations, others)
        return _Moment(phase, sum(kinds.values()) + activations[0], activations[1], activations, kinds)


def _cpu_process_bytes(profile: Profile) -> int:
    """Return an upper limit of a CPU rank's private memory without tensors.

    The limit depends on the libraries that the model imports.
    """
    if not names_callable(profile.model):
        if profile.trained < profile.parameters:
            return CPU_PROCESS_BYTES["peft or diffusers"][1]
        if profile.model_type or profile.cnn:
            return CPU_PROCESS_BYTES["transformers" if profile.model_type else "torch"][1]
    return CPU_PROCESS_HIGH_BYTES  # a user's own code, or a model whose libraries a profile does not name


def _forward_moments(kind: Pass, layout: PlannedLayout, device: str) -> Iterator[LiveMemory]:
    """Yield the moments of the forward with the most live bytes."""
    # with accumulation this is a later forward, when gradients of earlier micro batches exist
    line, gradients, buckets = kind.line, 0, 0
    if layout.zero_stage < 2:
        gradients = layout.element_bytes * kind.graded
        if kind.graded and layout.zero_stage == 1:
            buckets = layout.element_bytes * layout.bucket * (1 + layout.overlap)
    elif layout.accumulation > 1 and layout.zero_stage == 2 and layout.offload_optimizer == "none":
        gradients = layout.element_bytes * overlap_in_partition(line, layout.zero_ranks)
    gathered = copied = [0] * len(line.forward)
    if layout.zero_stage == 3:
        if device == "cpu":  # host and device memory are one
            layout = replace(layout, offload_param="none")
        gathered, copied = gathered_in_forward(line, layout), gathered_at_once(line, layout, device)
    for (layer, before, points), gathered_bytes, copy in zip(line.forward, gathered, copied, strict=True):
        for point in points:
            yield LiveMemory(point, gradients, buckets, gathered_bytes, layer=layer)
        yield LiveMemory(before, gradients, buckets, gathered_bytes, copy, layer=layer)


def _distinct_stages(stages: tuple[tuple[tuple[int, int], ...], ...], runs: Sequence[int]) -> list[int]:
    """Choose the stages to forecast. `runs`: the kind of each layer."""
    # The first and the last stage, and the first of other stages with equal layers. With two parts per stage also the
    # last of these: its second part has the most micro batches in flight.
    kinds: dict[tuple, list[int]] = {}
    for stage, parts in enumerate(stages):
        layers = tuple(tuple(runs[first:last]) for first, last in parts)
        kinds.setdefault((layers, stage == 0, stage == len(stages) - 1), []).append(stage)
    return [stage for same in kinds.values() for stage in dict.fromkeys(same[:: len(same) - 1 or 1][: len(stages[0])])]
