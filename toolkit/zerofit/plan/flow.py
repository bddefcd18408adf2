"""Compute the time of layers that fetch parameters ahead and reduce gradients later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerofit.plan.passes import RankPass, StageLayers


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
