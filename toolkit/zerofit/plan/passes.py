"""Compute the seconds of each layer in one micro batch.

The seconds include kernels, launches, hooks, and the collectives that a layer waits for. Layers fetch parameters ahead
and reduce gradients later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zerofit.features.checkpointing import REPEATED
from zerofit.plan.kernels import collective_s, group_of, kernels_s, launches
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.pipeline import stage_parts
from zerofit.plan.rates import Rates
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import Kernel, LayerCost, Profile


class LayerWork(NamedTuple):
    """Seconds of one layer in one direction (forward or backward), on one rank."""

    kernels_s: float
    host_s: float  # launches and ZeRO-3's hooks
    tensor_s: float  # all-reduces of tensor parallelism, which nothing overlaps
    sequence_s: float  # all-to-alls of sequence parallelism, which nothing overlaps
    experts_s: float  # tokens to other ranks' experts and back, which nothing overlaps
    copy_s: float  # activations to the host and back, on the kernels' stream
    layer_s: float  # from its first kernel to its last

    @property
    def computed_s(self) -> float:
        """Seconds without waits and copies."""
        return self.layer_s - self.tensor_s - self.sequence_s - self.experts_s - self.copy_s


class StageLayers(NamedTuple):
    """Consecutive equal layers in a pipeline stage."""

    layer: int  # index in the profile's layers
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPass:
    """The pass of one micro batch through all pipeline stages.

    All tuples but `parts` have one entry per layer of the profile.
    """

    parts: tuple[tuple[tuple[StageLayers, ...], ...], ...]  # of each stage
    forward: tuple[LayerWork, ...]
    backward: tuple[LayerWork, ...]
    elements: tuple[int, ...]  # of parameters, on one rank
    trained: tuple[int, ...]  # elements with gradients, on one rank
    gradients: tuple[int, ...]  # number of parameters with gradients, on one rank
    experts: tuple[int, ...]  # elements of experts, among `elements`
    output_bytes: float  # what a stage sends to the next
    ahead: bool  # whether launches and hooks run ahead of the device

    @cached_property
    def stages(self) -> tuple[tuple[StageLayers, ...], ...]:
        """The layers of each stage, in the order of the forward."""
        return tuple(tuple(chain(*parts)) for parts in self.parts)

    @cached_property
    def slowest(self) -> tuple[StageLayers, ...]:
        """The layers of the slowest stage."""
        return max(self.stages, key=lambda stage: self.total(stage, self.forward) + self.total(stage, self.backward))

    @cached_property
    def parameters(self) -> int:
        """The number of parameter elements on one rank of the largest stage."""
        return max(self.elements_of(stage) for stage in self.stages)

    @cached_property
    def trained_parameters(self) -> int:
        """The number of trained elements on one rank, in the stage with the most trained elements."""
        return max(self.trained_of(stage) for stage in self.stages)

    @cached_property
    def trained_tensors(self) -> int:
        """The number of trained parameters on one rank, in the stage with most trained elements."""
        return sum(n * self.gradients[i] for i, n in max(self.stages, key=self.trained_of))

    @cached_property
    def expert_share(self) -> float:
        """The experts' share of all parameters, in the stage with the most parameters."""
        stage = max(self.stages, key=self.elements_of)
        return sum(n * self.experts[i] for i, n in stage) / max(1, self.elements_of(stage))

    @cached_property
    def forward_s(self) -> float:
        """Seconds of forward in the stage where it is slowest, without fetches."""
        return max(self.total(stage, self.forward) for stage in self.stages)

    @cached_property
    def backward_s(self) -> float:
        """Seconds of backward in the stage where it is slowest, without fetches and reductions."""
        return max(self.total(stage, self.backward) for stage in self.stages)

    @cached_property
    def sums(self) -> LayerWork:
        """Seconds of the slowest stage, forward and backward together."""
        works = [(n, work) for i, n in self.slowest for work in (self.forward[i], self.backward[i])]
        return LayerWork(*(sum(n * work[part] for n, work in works) for part in range(len(LayerWork._fields))))

    def elements_of(self, stage: tuple[StageLayers, ...]) -> int:
        """Return the number of parameter elements of a stage on one rank."""
        return sum(n * self.elements[i] for i, n in stage)

    def trained_of(self, stage: Sequence[StageLayers]) -> int:
        """Return the number of trained elements of a stage on one rank."""
        return sum(n * self.trained[i] for i, n in stage)

    @staticmethod
    def total(stage: tuple[StageLayers, ...], works: tuple[LayerWork, ...]) -> float:
        """Return the seconds of a stage's layers in one direction. `works`: of the profile's layers."""
        return sum([n * works[i].layer_s for i, n in stage])


class Passes:
    """Computes the passes of one model on one cluster. Layouts share results where they can."""

    def __init__(self, profile: Profile, cluster: Cluster, rates: Rates):
        self._profile, self._cluster, self._rates = profile, cluster, rates
        self._known: dict[tuple, RankPass] = {}
        self._known_kernels: dict[tuple[str, int], list[tuple[tuple[float, float], tuple[float, float]]]] = {}

    def of(self, layout: PlannedLayout) -> RankPass:
        """Return the pass of a layout.

        Raises KeyError if the profile was not traced for the layout's setting.
        """
        # everything that changes the result
        hooks = layout.zero_stage == 3, layout.by_layer, self._handles(layout), self._ahead(layout)
        degrees = (layout.tp, layout.sp, layout.ep, layout.pp, layout.schedule, *hooks)
        key = (layout.precision, layout.checkpointing, layout.micro_batch, *degrees)
        if key not in self._known:
            self._known[key] = self._computed(layout)
        return self._known[key]

    def _computed(self, layout: PlannedLayout) -> RankPass:
        key = layout.setting
        costs, layers = self._profile.costs[key], self._profile.layers
        pairs = list(zip(costs, layers, strict=True))
        tensors = [(cost.matrices or layer.matrices, cost.vectors or layer.vectors) for cost, layer in pairs]
        kernels = self._kernels(key, layout.micro_batch)
        # the layers of each pipeline stage
        flat = [index for index, layer in enumerate(layers) for _ in range(layer.count)]
        stages = [
            [sorted(Counter(flat[first:last]).items()) for first, last in parts]
            for parts in stage_parts(self._profile, layout)
        ]
        last_of_first = stages[0][0][-1][0]
        copies = [cost.host_bytes.at(layout.micro_batch) / self._rates.pcie for cost in costs]
        packed = [tuple(-(-size // layout.element_bytes) for size in layer.packed) for layer in layers]
        every = [(*own, layer.frozen + bits) for own, layer, bits in zip(tensors, layers, packed, strict=True)]
        # DeepSpeed fetches and releases by module, about one per tensor; FSDP2's hooks run once per layer
        hooks = [(1 if layout.by_layer else sum(map(len, kinds))) if layout.zero_stage == 3 else 0 for kinds in every]
        gradients = [sum(map(len, own)) for own in tensors]
        handled = gradients if self._handles(layout) else [0] * len(gradients)
        # with checkpointing, forward's hooks and collectives run again in backward
        times = (1, REPEATED[layout.checkpointing])
        directions = [
            tuple(
                self._work(
                    seconds[backward],
                    (*waits, copy),
                    (times[backward], hooked * (1 + (backward and bool(layout.checkpointing))), own if backward else 0),
                    self._ahead(layout),
                )
                for seconds, waits, copy, hooked, own in zip(
                    kernels, self._waits(costs, layout), copies, hooks, handled, strict=True
                )
            )
            for backward in (False, True)
        ]
        return RankPass(
            parts=tuple(tuple(tuple(StageLayers(*pair) for pair in part) for part in parts) for parts in stages),
            forward=directions[0],
            backward=directions[1],
            elements=tuple(sum(map(sum, kinds)) for kinds in every),
            trained=tuple(sum(map(sum, own)) for own in tensors),
            gradients=tuple(gradients),
            experts=tuple(sum(cost.matrices[index_in_layer] for index_in_layer in cost.experts) for cost in costs),
            output_bytes=costs[last_of_first].output_bytes.at(layout.micro_batch) if layout.pp > 1 else 0.0,
            ahead=self._ahead(layout),
        )

    def _handles(self, layout: PlannedLayout) -> bool:
        """Return whether gradients cost host time during backward."""
        # on a GPU at stage 0, the cost comes after backward
        return (layout.zero_stage > 0 and not layout.by_layer) or not self._rates.ahead

    def _ahead(self, layout: PlannedLayout) -> bool:
        """Return whether launches run ahead of the device."""
        # ZeRO-3 on one rank waits for each fetched parameter instead (zero/partition_parameters.py:84)
        return self._rates.ahead and (layout.zero_stage < 3 or layout.zero_ranks > 1 or layout.by_layer)

    def _kernels(self, key: str, micro_batch: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        if (key, micro_batch) not in self._known_kernels:
            self._known_kernels[key, micro_batch] = [
                (self._busy(cost.forward_kernels, micro_batch), self._busy(cost.backward_kernels, micro_batch))
                for cost in self._profile.costs[key]
            ]
        return self._known_kernels[key, micro_batch]

    def _busy(self, kernels: Sequence[Kernel], micro_batch: int) -> tuple[float, float]:
        return kernels_s(kernels, micro_batch, self._rates), launches(kernels) * self._rates.launch_s

    def _waits(self, costs: tuple[LayerCost, ...], layout: PlannedLayout) -> list[tuple[float, float, float]]:
        """Return each layer's seconds of tensor, sequence and expert collectives in forward."""
        if layout.tp * layout.sp * layout.ep == 1:
            return [(0.0, 0.0, 0.0)] * len(costs)
        gpus, m = self._cluster.gpus, layout.micro_batch
        tp, sp, ep = (
            group_of(n, stride, gpus) for n, stride in ((layout.tp, 1), (layout.sp, layout.tp), (layout.ep, 1))
        )
        # Attention and MLP all-reduce once each. Ulysses sends queries, keys, values and outputs. Expert parallelism
        # sends the counts of tokens, the tokens to their experts, and the results back.
        return [
            (
                collective_s("all_reduce", cost.tp_allreduce_bytes.at(m), 2, tp, self._rates),
                collective_s("all_to_all", cost.sp_alltoall_bytes.at(m), 4, sp, self._rates),
                collective_s("all_to_all", cost.ep_alltoall_bytes.at(m), 3 if cost.experts else 0, ep, self._rates),
            )
            for cost in costs
        ]

    def _work(
        self,
        seconds: tuple[float, float],
        waits: tuple[float, float, float, float],
        counts: tuple[float, int, int],
        ahead: bool,
    ) -> LayerWork:
        """Return the work of one layer in one direction.

        `seconds`: of kernels and of launches. `waits`: seconds of the collectives of tensor, sequence and expert
        parallelism, and of a copy. `counts`: how often the collectives run, the number of ZeRO-3 hooks, and the number
        of gradients.
        """
        times, hooks, gradients = counts
        busy_s = seconds[0]
        host_s = seconds[1] + hooks * self._rates.hook_s + gradients * self._rates.gradient_s
        tensor_s, sequence_s, experts_s = (times * wait for wait in waits[:3])
        # a host that runs ahead is hidden by the device, unless it is slower
        on_device_s = max(busy_s, host_s) if ahead else busy_s + host_s
        waited_s = tensor_s + sequence_s + experts_s + waits[3]
        return LayerWork(busy_s, host_s, tensor_s, sequence_s, experts_s, waits[3], on_device_s + waited_s)


# While a layer computes, ZeRO-3 gathers the parameters of later layers. Backward also reduces the gradients of the
# layers that are done. Links and device are a queue each:
#
#     links    fetch 1 | fetch 2 | fetch 3 |          reduce 1 | reduce 2 ...
#     device           | layer 1 | layer 2 | layer 3
#                        a layer waits for its fetch; a reduction waits for all fetches and for its layers
#
# The end of a queue is the longest path through this picture. A model has few runs of equal layers, so
# the path is found in a step for each run instead of each layer.
class FlowRun(NamedTuple):
    """Equal groups of equal layers, and the seconds of each part without contention."""

    groups: int
    layers: int  # per group
    fetch_s: float  # per layer, on the links
    compute_s: float  # per layer, after it is fetched
    reduce_s: float  # per group, on the links, after its last layer has computed and every layer is fetched


class FlowEnds(NamedTuple):
    """The ends of the last fetch, layer and reduction, in seconds without contention."""

    fetched_s: float
    computed_s: float
    reduced_s: float


def flow_ends(runs: Sequence[FlowRun]) -> FlowEnds:
    """Return when the last fetch, layer and reduction end."""
    # At most one fetch, one layer and one reduction run at a time. In a run of equal layers, the critical path goes
    # through fetches, then layers, then reductions. The path can switch from fetches to layers at any layer, and from
    # layers to reductions at any group. Moving such a switch by one layer (or group) always changes the path's length
    # by the same amount. So in the longest path, each switch is at the first or the last layer (or group).
    fetched = computed = 0.0
    reduced = sum(groups * layers * fetch for groups, layers, fetch, _, _ in runs)
    for groups, layers, fetch, compute, reduce in runs:
        count = groups * layers
        group_computed, all_computed, all_reduced = layers * compute, count * compute, groups * reduce
        if reduce:
            ways = (
                reduced + all_reduced,
                computed + max(group_computed + all_reduced, all_computed + reduce),
                fetched + max(fetch + group_computed, layers * fetch + compute) + all_reduced,
                fetched + max(fetch + all_computed, count * fetch + compute) + reduce,
            )
            reduced = max(ways)
        computed = max(computed + all_computed, fetched + max(fetch + all_computed, count * fetch + compute))
        fetched += count * fetch
    return FlowEnds(fetched, computed, max(reduced, computed))


def flow_s(runs: Sequence[FlowRun], exposed: float) -> float:
    """Return the seconds of layers, with contention.

    While links and compute are both busy, both are slower by the share `exposed`.
    """
    # at any time at least one of them is busy, so both are for the sum of their busy times minus the time that passes
    alone_s = flow_ends(runs).reduced_s
    busy_s = sum(run.groups * (run.layers * (run.fetch_s + run.compute_s) + run.reduce_s) for run in runs)
    return alone_s + exposed * (busy_s - alone_s)


class ReduceGroup(NamedTuple):
    """Layers whose gradients fill a bucket, in backward order; equal groups share one entry."""

    groups: int  # number of equal groups
    members: tuple[StageLayers, ...]  # per group
    elements: int  # per group


def reduce_groups(rank_pass: RankPass, stage: Sequence[StageLayers], bucket: int) -> Iterator[ReduceGroup]:
    """Yield a stage's layers in groups whose gradients fill a bucket, in backward order.

    The final group may be smaller.
    """
    members: list[StageLayers] = []
    elements = 0
    for layer, count in reversed(stage):
        size, left = rank_pass.trained[layer], count
        while left:
            needed = left if size == 0 else min(left, max(1, -(-(bucket - elements) // size)))
            members.append(StageLayers(layer, needed))
            elements, left = elements + needed * size, left - needed
            if elements >= bucket:
                same = 1 + left // needed if len(members) == 1 else 1
                yield ReduceGroup(same, tuple(members), elements)
                left -= (same - 1) * needed
                members, elements = [], 0
    if members:
        yield ReduceGroup(1, tuple(members), elements)
