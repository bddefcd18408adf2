"""Forecast the seconds of an optimizer step.

The step has compute, collectives, transfers and the optimizer, in DeepSpeed's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from zerofit.features.optimizer import UNSTEPPED_BYTES
from zerofit.features.optimizers import OPTIMIZERS
from zerofit.plan.dualpipev import PartSeconds, TimedPass, timed_passes
from zerofit.plan.fsdp2 import block_fetches
from zerofit.plan.kernels import RankGroup, collective_s, group_of
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.optimizer_states import host_state_bytes
from zerofit.plan.passes import FlowRun, Passes, RankPass, ReduceGroup, flow_s, reduce_groups
from zerofit.plan.persistent import MASTER_BYTES, kept_gathered
from zerofit.plan.rates import Rates
from zerofit.plan.timeline import StageTimeline, timeline
from zerofit.plan.zero3_gather import LayerFetches, fetches
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import Profile, setting

# elements that SuperOffload sends to its process at a time (sub_group_size of the bundled JSON)
EARLY_GROUP = 100_000_000
# bytes of host memory read and written per element, besides the optimizer's: clipping reads and writes the gradient
# (8, stage3.py:2988), and the stepped parameter is converted (6, stage3.py:2858)
HOST_BYTES = 14  # the host's step does not scale the gradient or take its norm (see `UNSTEPPED_BYTES`)

Stream = Literal[
    "compute",
    "host",
    "data parallel",
    "tensor parallel",
    "sequence parallel",
    "expert parallel",
    "pipeline",
    "device to host",
    "host to device",
    "NVMe",
]
HANDLED = "gradients into buckets and out"  # the engine's passes over gradients
ADDED = "gradients added up"
GATHERED = "all-gather of stepped parameters"
TRANSFERS = ("device to host", "host to device", "NVMe")


class EngineWork(NamedTuple):
    """The engine's own memory traffic per parameter element, and its kernel launches.

    Traffic is in bytes that kernels read and write per element.
    """

    gradients: int  # for all gradients per reduction: copied into a bucket, divided, copied out of it
    kept: int  # for the rank's share of all gradients
    added: int  # for the share: adding gradients of earlier micro batches
    step: int  # for the share: overflow, norm, scale, flattening, copying parameters back; without Adam itself
    looped: int  # kernels per parameter of the share in the step: overflow and norm
    begun: int  # other kernels of the step


# by ZeRO stage, counted on fake tensors by `tests/plan/engine_ops.py`: with 16-bit weights, then with float32 weights
_HALF = (
    EngineWork(10, 0, 0, 38, 15, 10),
    EngineWork(16, 6, 6, 48, 15, 84),
    EngineWork(16, 6, 6, 48, 15, 84),
    EngineWork(14, 6, 0, 44, 2, 60),
)
_FULL = (
    EngineWork(20, 0, 0, 12, 2, 9),
    EngineWork(32, 12, 12, 48, 2, 78),
    EngineWork(32, 12, 12, 48, 2, 78),
    EngineWork(28, 12, 0, 48, 2, 58),
)
DIVIDED = 2  # reads and writes of a gradient to divide it by the number of ranks, at stage 0
UNSCALED = 8, 10  # further bytes and kernels of the step with a loss scale, at stage 3
CLIPPED = 12  # reads and writes of a gradient in float32, for its norm and to scale it


def engine_work(layout: PlannedLayout) -> EngineWork:
    """Return the engine's own work for a layout, by its ZeRO stage and precision."""
    if layout.by_layer:  # parameters are copied out of the gathered buffer, gradients into the buffer to scatter
        copied, scattered = (1 + layout.reshard) * 2 * layout.element_bytes, layout.element_bytes + layout.reduced_bytes
        return EngineWork(copied + scattered, 0, 0, UNSTEPPED_BYTES + CLIPPED, 0, 30)
    half, stage = layout.element_bytes == 2, layout.zero_stage
    work = (_HALF if half else _FULL)[stage]
    if stage == 0 and layout.zero_ranks > 1:
        return work._replace(gradients=work.gradients + DIVIDED * layout.element_bytes)
    if stage == 3 and layout.precision == "fp16":
        return work._replace(step=work.step + UNSCALED[0], begun=work.begun + UNSCALED[1])
    return work


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and of its parts, without time that compute hides."""

    step_s: float
    compute_s: float  # forward and backward of all micro batches
    gather_s: float  # ZeRO-3: waiting for gathered parameters
    reduce_s: float  # gradients, including the engine's passes over them
    tensor_s: float  # all-reduces of tensor parallelism
    sequence_s: float  # all-to-alls of sequence parallelism
    experts_s: float  # all-to-alls of expert parallelism
    bubble_s: float  # a pipeline's idle time while it fills and drains
    optimizer_s: float  # the optimizer's step with its launches, and the all-gather of stepped parameters
    transfer_s: float  # offloading between device, host and disks, including activations

    def scaled(self, factor: float) -> StepTime:
        """Return the times multiplied by `factor`."""
        return StepTime(**{name: factor * value for name, value in asdict(self).items()})


class StepTask(NamedTuple):
    """Work that overlaps with no other work: it waits for everything before it."""

    stream: Stream
    name: str
    bytes: float
    seconds: float

    def scaled(self, factor: float) -> StepTask:
        """Return the task with its bytes and seconds multiplied by `factor`."""
        return self._replace(bytes=factor * self.bytes, seconds=factor * self.seconds)


class Fetches(NamedTuple):
    """ZeRO-3's all-gathers for each layer of the profile, with their times."""

    copy_s: float  # per byte, from the host or the disks
    gather_s: float  # per byte, over the links
    call_s: float
    forward: tuple[tuple[float, float], ...]  # bytes and number of all-gathers, averaged over equal layers
    backward: tuple[tuple[float, float], ...]

    def bytes(self, layer: int, backward: bool) -> float:
        """Return the bytes that are gathered for `layer` in one direction."""
        return (self.backward if backward else self.forward)[layer][0]

    def seconds(self, layer: int, backward: bool) -> float:
        """Return the seconds of the all-gathers for `layer` in one direction."""
        size, calls = (self.backward if backward else self.forward)[layer]
        return size * (self.copy_s + self.gather_s) + calls * self.call_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """The parts of a step in the engine's order, for both its time and its timeline."""

    layout: PlannedLayout
    rank_pass: RankPass
    exposed: float  # share of a collective's time that compute does not hide
    fetches: Fetches | None  # of parameters; None below ZeRO-3
    reduce_s: float  # of all gradients, in the stage with most parameters
    groups: Sequence[ReduceGroup]  # of backward; () if nothing overlaps with it
    overlapped: bool  # whether gradients are reduced during backward
    send_s: float  # of an activation or its gradient to the next pipeline stage
    first: tuple[StepTask, ...]  # after the first micro batch
    later: tuple[StepTask, ...]  # after each later micro batch
    step: tuple[StepTask, ...]  # of the optimizer, after all micro batches

    @property
    def reductions(self) -> int:
        """The number of micro batches that end with a reduction."""
        # at stages 0 and 1, and if FSDP keeps full gradients between micro batches, only the last micro batch does
        each = self.layout.zero_stage >= 2 and not self.layout.keeps_full_gradients
        return self.layout.accumulation if each else 1

    @property
    def forward_s(self) -> float:
        """Seconds of one micro batch's forward in the slowest stage, including waits."""
        if self.fetches is None:
            return self.rank_pass.forward_s
        forward = self.rank_pass.forward
        runs = [FlowRun(1, n, self.fetch_s(i, False), forward[i].layer_s, 0.0) for i, n in self.rank_pass.slowest]
        return flow_s(runs, self.exposed)

    def backward_s(self, reducing: bool) -> float:
        """Return the seconds of one micro batch's backward.

        `reducing`: whether it reduces gradients.
        """
        if self.fetches is None and not reducing:
            return self.rank_pass.backward_s
        runs = []
        for group in self.groups:
            share_s = self.share_s(group.elements) if reducing else 0.0
            for number, (layer, count) in enumerate(group.members, start=1):
                # the last layer of a group fills the bucket, so it is reduced after that layer
                reduce_s = share_s if number == len(group.members) else 0.0
                layer_s = self.rank_pass.backward[layer].layer_s
                runs.append(FlowRun(group.groups, count, self.fetch_s(layer, True), layer_s, reduce_s))
        return flow_s(runs, self.exposed)

    def timed_passes(self, micro_batches: int) -> list[TimedPass]:
        """Return the passes of all stages in DualPipeV's order, with their times."""
        rank_pass = self.rank_pass
        forward, backward = rank_pass.forward, rank_pass.backward
        seconds = [
            [PartSeconds(rank_pass.total(part, forward), rank_pass.total(part, backward)) for part in parts]
            for parts in rank_pass.parts
        ]
        return timed_passes(seconds, micro_batches, self.send_s)

    def dualpipev_s(self) -> float:
        """Return the seconds of all passes with DualPipeV."""
        layout = self.layout
        # once the pipeline is full, each further micro batch adds the time that the slowest stage needs for it
        simulated = min(layout.accumulation, 3 * layout.pp)
        further_s = (layout.accumulation - simulated) * (self.rank_pass.sums.layer_s + 4 * self.send_s)
        return max(step.end_s for step in self.timed_passes(simulated)) + further_s

    def fetch_s(self, layer: int, backward: bool) -> float:
        """Return the seconds to gather `layer` in one direction."""
        return self.fetches.seconds(layer, backward) if self.fetches else 0.0

    def share_s(self, elements: int) -> float:
        """Return the seconds to reduce `elements` elements of the gradients."""
        return self.reduce_s * elements / max(1, self.rank_pass.trained_parameters)


# The time of an optimizer step. `Timer.parts` describes the step once, as `StepParts`. Two forms read it:
#
#     closed form   `Timer.step` adds the parts up; a search times ten thousand layouts with it (0.1 ms each)
#     timeline      `step_timeline` places every kernel and collective; for traces and for tests of the closed form
#
# With m micro batches, forward f, backward b (with the reductions that it hides), p pipeline stages and 1F1B:
#
#     step = (m + p - 1) (f + b + 2 send)                     passes of all stages in lockstep
#          + reductions x (what backward does not hide)       once at stages 0 and 1, m times at stages 2 and 3
#          + the engine's passes over gradients + optimizer + copies between device, host and disks
#
# A layer takes max(kernels, launches) on a GPU, whose host runs ahead, and their sum on a CPU.
# Collectives of tensor, sequence and expert parallelism are added, since the next kernel needs their result.
class Timer:
    """Forecasts step times for one model on one cluster. Layouts share results where they can."""

    def __init__(self, profile: Profile, cluster: Cluster, rates: Rates):
        self._profile, self._cluster, self.rates = profile, cluster, rates
        self._passes = Passes(profile, cluster, rates)
        self._groups: dict[tuple[RankPass, int], Sequence[ReduceGroup]] = {}
        self._engine_timers = {engine: Timer(model, cluster, rates) for engine, model in profile.own_models.items()}

    def step(self, layout: PlannedLayout) -> StepTime:
        """Return the time of one optimizer step.

        Raises KeyError if the profile was not traced for the layout's setting.
        """
        parts = self.parts(layout)
        rank_pass, micro_batches, sums = parts.rank_pass, layout.accumulation, parts.rank_pass.sums
        forward_s, backward_s = parts.forward_s, parts.backward_s(reducing=False)
        micro_batch_s = forward_s + backward_s + 2 * parts.send_s
        reduce_wait_s = parts.backward_s(reducing=True) - backward_s if parts.overlapped else parts.reduce_s
        gather_wait_s = forward_s - rank_pass.forward_s + backward_s - rank_pass.backward_s
        if layout.schedule == "dualpipev":
            passes_s = parts.dualpipev_s()
            bubble_s = passes_s - micro_batches * sums.layer_s
        else:  # stages run in lockstep: each stage waits for slower stages, and while the pipeline fills and drains
            passes_s = (micro_batches + layout.pp - 1) * micro_batch_s
            bubble_s = (layout.pp - 1) * micro_batch_s + micro_batches * (micro_batch_s - gather_wait_s - sums.layer_s)
        tasks = [(1, task) for task in (*parts.first, *parts.step)] + [(micro_batches - 1, t) for t in parts.later]
        moved_s = sum(times * task.seconds for times, task in tasks if task.stream in TRANSFERS)
        handled_s = sum(times * task.seconds for times, task in tasks if task.name in (HANDLED, ADDED))
        optimizer_s = sum(times * task.seconds for times, task in tasks) - moved_s - handled_s
        reduce_s = parts.reductions * reduce_wait_s + handled_s
        return StepTime(
            step_s=passes_s + reduce_s + optimizer_s + moved_s,
            compute_s=micro_batches * sums.computed_s,
            gather_s=micro_batches * gather_wait_s,
            reduce_s=reduce_s,
            tensor_s=micro_batches * sums.tensor_s,
            sequence_s=micro_batches * sums.sequence_s,
            experts_s=micro_batches * sums.experts_s,
            bubble_s=bubble_s,
            optimizer_s=optimizer_s,
            transfer_s=micro_batches * sums.copy_s + moved_s,
        )

    def parts(self, layout: PlannedLayout) -> StepParts:
        """Return the parts of one optimizer step.

        Raises KeyError if the profile was not traced for the layout's setting.
        """
        if layout.engine in self._engine_timers:
            return self._engine_timers[layout.engine].parts(layout)
        rank_pass, gpus = self._passes.of(layout), self._cluster.gpus
        shards = group_of(layout.shard_ranks, layout.tp, gpus)
        # consecutive pipeline stages: pipe is the outermost axis of DeepSpeed's topology
        neighbors = group_of(2 if layout.pp > 1 else 1, layout.world_size // layout.pp, gpus)
        first, later = self._accumulate(layout, rank_pass)
        # With overlap_comm or FSDP, reductions run beside backward. Otherwise they run on backward's stream
        # (stage3.py:341, stage_1_and_2.py, average_tensor), at stage 0 after it, in a pipeline after its last pass.
        overlapped = (layout.overlap or layout.by_layer) and layout.zero_stage > 0 and layout.pp == 1
        return StepParts(
            layout=layout,
            rank_pass=rank_pass,
            exposed=self.rates.exposed_between if shards.nodes > 1 else self.rates.exposed_inside,
            fetches=self._fetches(layout, rank_pass, shards) if layout.zero_stage == 3 else None,
            reduce_s=self._reduce_s(layout, rank_pass),
            groups=self._reduce_groups(rank_pass, layout.bucket) if overlapped or layout.zero_stage == 3 else (),
            overlapped=overlapped,
            send_s=collective_s("send", rank_pass.output_bytes, 1, neighbors, self.rates),
            first=first,
            later=later,
            step=tuple(self._step_tasks(layout, rank_pass)),
        )

    def _share(self, layout: PlannedLayout, rank_pass: RankPass) -> float:
        """Return one rank's share of the parameters; an expert has shard_ranks / ep ranks."""
        return (1 + (layout.ep - 1) * rank_pass.expert_share) / layout.shard_ranks

    def _spread_s(
        self,
        op: str,
        size_bytes: float,
        calls: float,
        layout: PlannedLayout,
        rank_pass: RankPass,
        *,
        at_once: bool = False,
    ) -> float:
        """Return the seconds of a collective of parameters.

        For the parameters of experts, the collective runs among the ranks with the same experts.
        """
        gpus, experts = self._cluster.gpus, rank_pass.expert_share
        shards = group_of(layout.shard_ranks, layout.tp, gpus)
        others_s = collective_s(
            op, size_bytes * (1 - experts), calls * (1 - experts), shards, self.rates, at_once=at_once
        )
        if layout.ep == 1:
            return others_s
        same = group_of(layout.zero_ranks // layout.ep, layout.ep, gpus)
        return others_s + collective_s(op, size_bytes * experts, calls * experts, same, self.rates, at_once=at_once)

    def _reduce_groups(self, rank_pass: RankPass, bucket: int) -> Sequence[ReduceGroup]:
        if (rank_pass, bucket) not in self._groups:
            self._groups[rank_pass, bucket] = tuple(reduce_groups(rank_pass, rank_pass.slowest, bucket))
        return self._groups[rank_pass, bucket]

    def _fetches(self, layout: PlannedLayout, rank_pass: RankPass, shards: RankGroup) -> Fetches:
        """Return ZeRO-3's all-gathers, in the order of DeepSpeed's coordinator, with their times."""
        # shards on the host are copied on the stream that gathers them (partition_parameters.py, all_gather_coalesced)
        copy_s, share = 0.0, self._share(layout, rank_pass)
        if layout.offload_param == "cpu":
            copy_s = share / self.rates.host_copy(layout.pin_param)
        elif layout.offload_param == "nvme":
            copy_s = share * self._cluster.gpus / self.rates.nvme_read
        if layout.by_layer:  # the host has the weights
            copy_s *= layout.weight_bytes / layout.element_bytes
            forward, backward = block_fetches(rank_pass.elements, layout)
        else:
            forward, backward = (tuple(self._layer_means(by_layer)) for by_layer in fetches(self._line(layout), layout))
        return Fetches(
            copy_s=copy_s,
            gather_s=self._spread_s("all_gather", 1, 0, layout, rank_pass),
            call_s=collective_s("all_gather", 0, 1, shards, self.rates),
            forward=forward,
            backward=backward,
        )

    def _line(self, layout: PlannedLayout) -> StageTimeline:
        key = self._profile.key_of(layout.setting, 3)
        return timeline(self._profile, key, None, 0, layout.has_weight_decay)

    def _layer_means(self, by_layer: Sequence[LayerFetches]) -> Iterator[tuple[float, float]]:
        """Yield bytes and number of all-gathers of each layer, averaged over equal layers."""
        start = 0
        for layer in self._profile.layers:
            equal, start = by_layer[start : start + layer.count], start + layer.count
            yield sum(fetch.bytes for fetch in equal) / layer.count, sum(fetch.calls for fetch in equal) / layer.count

    def _reduce_s(self, layout: PlannedLayout, rank_pass: RankPass) -> float:
        """Return the seconds to reduce all gradients."""
        if layout.by_layer:  # a reduce-scatter for each layer, and with replicas an all-reduce of the shard
            size, layers = layout.reduced_bytes * rank_pass.trained_parameters, sum(n for _, n in rank_pass.slowest)
            replicas = group_of(layout.replicas, layout.shard_ranks, self._cluster.gpus)
            shared_s = collective_s("all_reduce", size / layout.shard_ranks, layers, replicas, self.rates)
            return self._spread_s("reduce_scatter", size, layers, layout, rank_pass) + shared_s
        # stages 0 to 2 all-reduce buckets (stage_1_and_2.py, average_tensor)
        op = "reduce_scatter" if layout.zero_stage == 3 else "all_reduce"
        return self._spread_s(
            op, layout.element_bytes * rank_pass.trained_parameters, _calls(layout, rank_pass), layout, rank_pass
        )

    def _accumulate(
        self, layout: PlannedLayout, rank_pass: RankPass
    ) -> tuple[tuple[StepTask, ...], tuple[StepTask, ...]]:
        """Return the work on gradients after the first micro batch, and after each later one."""
        if layout.zero_stage < 2:  # autograd adds gradients to those of earlier micro batches
            added = 3 * layout.element_bytes * rank_pass.trained_parameters
            return (), (StepTask("compute", ADDED, added, added / self.rates.streaming),)
        first, later = ((self._handled(layout, rank_pass, later=is_later),) for is_later in (False, True))
        if layout.by_layer:
            added = (
                3 * layout.full_gradient_bytes * rank_pass.trained_parameters if layout.keeps_full_gradients else 0.0
            )
            return first, (*later, StepTask("compute", ADDED, added, added / self.rates.streaming))
        if layout.offload_optimizer == "none" or (layout.zero_stage == 2 and layout.accumulation == 1):
            return first, later
        # offloaded gradients are accumulated on the host: at stage 3 a rank's share (stage3.py:2015), at stage 2 the
        # gradients of all parameters (stage_1_and_2.py:1809)
        share = self._share(layout, rank_pass) if layout.zero_stage == 3 else 1
        moved = layout.element_bytes * rank_pass.trained_parameters * share
        seconds = moved / self.rates.host_copy(layout.pin_optimizer)
        up = StepTask("host to device", "accumulated gradients", moved, seconds)
        down = StepTask("device to host", "accumulated gradients", moved, seconds)
        return (*first, up, down) if layout.zero_stage == 3 else (*first, down), (*later, up, down)

    def _handled(self, layout: PlannedLayout, rank_pass: RankPass, *, later: bool) -> StepTask:
        """Return the engine's work on the reduced gradients of one micro batch.

        With `later` it is a later micro batch, else the first. At stages 0 and 1 it is the work of a step.
        """
        work, share = engine_work(layout), self._share(layout, rank_pass)
        moved = (work.gradients + share * (work.kept + later * work.added)) * rank_pass.trained_parameters
        return StepTask("compute", HANDLED, moved, moved / self.rates.streaming)

    def _step_tasks(self, layout: PlannedLayout, rank_pass: RankPass) -> Iterator[StepTask]:
        """Yield the last work on gradients, the step of a rank's share, and the all-gathers."""
        rates, gpus, work, element = self.rates, self._cluster.gpus, engine_work(layout), layout.element_bytes
        part = self._share(layout, rank_pass) if layout.zero_stage else 1
        share = part * rank_pass.trained_parameters
        entry = OPTIMIZERS[layout.optimizer]
        floats = share * layout.weight_bytes / MASTER_BYTES  # float32 elements of the same bytes
        moved = entry.step.moved_bytes * floats
        if layout.zero_stage < 2:
            yield self._handled(layout, rank_pass, later=False)
        launches = part * work.looped * rank_pass.trained_tensors + work.begun
        launched_s = launches * rates.engine_launch_s
        if rank_pass.ahead and layout.zero_stage and layout.offload_optimizer == "none":
            # hidden if the device is still busy; at stage 0 the host waits for each parameter's overflow check
            launched_s = max(0.0, launched_s - layout.accumulation * (rank_pass.sums.layer_s - rank_pass.sums.host_s))
        yield StepTask("host", "launches of the step", 0.0, launched_s)
        if layout.offload_optimizer == "none":
            traffic = (work.step - UNSTEPPED_BYTES) * floats
            yield StepTask("compute", "passes of the step", traffic, traffic / rates.streaming)
            yield StepTask("compute", "optimizer", moved, moved / getattr(rates, entry.step.like))
        else:
            # offloaded gradients are copied in float32
            states = MASTER_BYTES * floats + host_state_bytes(layout) * share
            traffic = moved + (HOST_BYTES - UNSTEPPED_BYTES) * floats
            copied = rates.host_copy(layout.pin_optimizer)
            graded = MASTER_BYTES * floats
            yield StepTask("device to host", "gradients of a step", graded, graded / copied)
            if layout.offload_optimizer == "nvme":
                yield StepTask("NVMe", "read optimizer states", states, states * gpus / rates.nvme_read)
            # a node's ranks share its host memory and its disks
            stepped = StepTask("host", "optimizer", traffic, traffic * gpus / rates.host)
            yield _left_of_step(stepped, layout, rank_pass, share)
            if layout.offload_optimizer == "nvme":
                yield StepTask("NVMe", "write optimizer states", states, states * gpus / rates.nvme_write)
            if layout.offload_param == "none":
                yield StepTask("host to device", "stepped parameters", element * share, element * share / copied)
        if layout.zero_stage in (1, 2):
            every = element * rank_pass.trained_parameters
            seconds = self._spread_s("all_gather", every, _calls(layout, rank_pass), layout, rank_pass)
            yield StepTask("data parallel", GATHERED, every, seconds)
        if layout.zero_stage == 3 and not layout.by_layer:
            # parameters that are kept gathered are gathered one by one (stage3.py:2841)
            persistent = kept_gathered(self._line(layout), layout)
            seconds = self._spread_s("all_gather", persistent.bytes, persistent.count, layout, rank_pass, at_once=True)
            yield StepTask("data parallel", GATHERED, persistent.bytes, seconds)


def _left_of_step(task: StepTask, layout: PlannedLayout, rank_pass: RankPass, elements: float) -> StepTask:
    """Return the part of the host's step that runs after backward."""
    if not layout.steps_early:
        return task
    # SuperOffload without clipping runs the other part during backward. Each group is queued as soon as backward has
    # computed its gradients, at even intervals (superoffload_stage3.py, partition_grads). The last group is stepped
    # after backward. If the host is slower than backward, all groups but the first wait for the host.
    groups = max(1, math.ceil(elements / EARLY_GROUP))
    left_s = max(task.seconds / groups, task.seconds - rank_pass.backward_s * (1 - 1 / groups))
    return task.scaled(left_s / task.seconds)


def _calls(layout: PlannedLayout, rank_pass: RankPass) -> float:
    """Return the number of buckets that hold all parameters; it may be a fraction."""
    return max(1.0, rank_pass.trained_parameters / max(1, layout.bucket))


def model_flops(profile: Profile, precision: str) -> float:
    """Return the FLOPs per sample of forward and backward.

    Backward counts as two forwards (train/metrics.py).

    Raises KeyError if the plain setting (no checkpointing, no parallelism) was not traced.
    """
    costs = profile.costs[setting(precision, False, 1, 1)]
    pairs = zip(profile.layers, costs, strict=True)
    return 3 * sum(layer.count * cost.forward_flops.per_sample for layer, cost in pairs)
