"""Stage 3's gathered parameters: how many of them are whole on a rank at each moment of a step.

Places are of DeepSpeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.persistent import ParameterSharers, sharers
from zerofit.plan.timeline import Parameter, StageTimeline

REUSE_ELEMENTS = 1_000_000_000  # zero_optimization.stage3_max_reuse_distance, its default (zero/config.py)
LIVE_ELEMENTS = 1_000_000_000  # zero_optimization.stage3_max_live_parameters, its default


def gathered_in_forward(line: StageTimeline, layout: PlannedLayout) -> list[int]:
    """Return the bytes that are gathered at most in the forward of each of line.forward's layers."""
    layers = _layers(line, layout)
    ahead = layers.fetched_ahead(len(line.layers) - 1)
    gathered = [max(ahead, layers.earlier[n] + layers.inside(n, recomputed=False)) for n, *_ in line.forward]
    return [layout.element_bytes * elements for elements in gathered]


def gathered_at_once(line: StageTimeline, layout: PlannedLayout, device: str) -> list[int]:
    """Return the bytes of the largest all-gather's second copy, for each of line.forward's layers.

    Several parameters come as one buffer, out of which each is then put together (partition_parameters.py:1343); gloo
    gathers one alone into a copy, too (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    layers = _layers(line, layout)
    return [layout.element_bytes * layers.at_once(n, 1 if device == "cpu" else 2) for n, *_ in line.forward]


def gathered_in_backward(line: StageTimeline, layout: PlannedLayout) -> list[int]:
    """Return the bytes that are gathered at most in each of line.backward's events."""
    layers = _layers(line, layout)
    found = []
    layer, released = -1, 0
    for event in line.backward:
        if event.layer != layer:
            layer, released = event.layer, 0
        inside, whole = layers.inside(layer, layout.checkpointing), layers.kept[layer] or layout.checkpointing
        gathered = max(layers.earlier[layer] + max(inside - released, 0), layers.fetched_ahead(layer, released))
        found.append(layout.element_bytes * gathered)
        if event.parameter is not None and whole and layers.gathers(event.parameter):
            released += event.parameter.numel
    return found


def _layers(line: StageTimeline, layout: PlannedLayout) -> _Layers:
    # a parameter on the host comes to the device even where it is whole
    return _cached_layers(line, layout.persistence, layout.prefetch, sharers(layout), layout.offload_param != "none")


class _Layers:
    """Layers and whether their parameters stay gathered from forward to backward (`__params_to_release`).

    A module's parameters are released after it, unless the trace uses them again within the reuse distance; between
    a layer's forward and its backward lies twice what follows it. Without other ranks nothing is gathered.
    """

    def __init__(self, line: StageTimeline, persistence: int, prefetch: int, spread: ParameterSharers, hosted: bool):
        self.persistence, self.prefetch, self.spread, self.hosted = persistence, prefetch, spread, hosted
        self.numels = [[p.numel for p in layer if self.gathers(p)] for layer in line.layers]
        totals = [sum(p.numel for p in layer) for layer in line.layers]
        following, self.kept = 0, [False] * len(totals)
        for n in reversed(range(len(totals))):
            self.kept[n] = 2 * following < REUSE_ELEMENTS
            following += totals[n]
        self.experts = any(p.expert for layer in line.layers for p in layer)
        self.needed = list(accumulate(map(sum, self.numels), initial=0))
        self.earlier = [0]
        for numels, kept in zip(self.numels, self.kept, strict=True):
            self.earlier.append(self.earlier[-1] + (sum(numels) if kept else 0))

    def fetched_ahead(self, layer: int, released: int = 0) -> int:
        """Count what is gathered once the layers up to one are all that are still needed, where experts are spread.

        Each module fetches ahead, and one has all experts in three parameters: so fetching runs through the layers
        until it meets its limit, and what it has passed stays (:649).
        """
        return min(LIVE_ELEMENTS, self.needed[layer + 1] - released) if self.experts else 0

    def inside(self, layer: int, recomputed: bool) -> int:
        """Count the elements of a layer's own parameters that are gathered at once: one in use, those fetched ahead."""
        numels = self.numels[layer]
        if self.kept[layer] or recomputed:
            return sum(numels)
        return max((numel + sum(self._ahead(numels[place + 1 :])) for place, numel in enumerate(numels)), default=0)

    def gathers(self, parameter: Parameter) -> bool:
        """Return whether a parameter is gathered and released: it is spread over ranks, and too large to stay."""
        return parameter.numel > self.persistence and (self.hosted or self.spread.of(parameter) > 1)

    def at_once(self, layer: int, fewest: int) -> int:
        """Count the elements of the largest all-gather of `fewest` parameters or more: one in use, or those ahead."""
        numels = self.numels[layer]
        groups = [[numel] for numel in numels] + [self._ahead(numels[place:]) for place in range(len(numels))]
        return max((sum(group) for group in groups if len(group) >= fewest), default=0)

    def _ahead(self, numels: Sequence[int]) -> list[int]:
        """Return parameters that are fetched together, until they reach the prefetch size (:447)."""
        ahead: list[int] = []
        for numel in numels:
            if sum(ahead) >= self.prefetch:
                break
            ahead.append(numel)
        return ahead


_cached_layers = lru_cache(maxsize=1024)(_Layers)
