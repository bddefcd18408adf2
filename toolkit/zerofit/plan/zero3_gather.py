"""Stage 3's gathered parameters: how many of them are whole on a rank at each moment of a step.

Places are of DeepSpeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    return [
        max(ahead, layers.fetched_past(n), layers.earlier[n] + layers.inside(n, layers.kept[n], forward=True))
        for n, *_ in line.forward
    ]


def gathered_at_once(line: StageTimeline, layout: PlannedLayout, device: str) -> list[int]:
    """Return the bytes of the largest all-gather's second copy, for each of line.forward's layers.

    Several parameters come as one buffer, out of which each is then put together (partition_parameters.py:1343); gloo
    gathers one alone into a copy, too (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    layers = _layers(line, layout)
    return [layers.at_once(n, 1 if device == "cpu" else 2) for n, *_ in line.forward]


def gathered_in_backward(line: StageTimeline, layout: PlannedLayout) -> list[int]:
    """Return the bytes that are gathered at most in each of line.backward's events."""
    layers = _layers(line, layout)
    found = []
    layer, released = -1, 0
    for event in line.backward:
        if event.layer != layer:
            layer, released = event.layer, 0
        whole = layers.kept[layer] or layout.checkpointing
        held = layers.earlier[layer] + layers.outliving(layer)
        inside = max(layers.inside(layer, whole) - released, 0) if layer >= layers.still else 0
        found.append(max(held + inside, layers.fetched_ahead(layer, released)))
        if event.parameter is not None and whole and layers.gathers(event.parameter):
            released += event.parameter.bytes(layout.element_bytes)
    return found


def _layers(line: StageTimeline, layout: PlannedLayout) -> _Layers:
    # a parameter on the host comes to the device even where it is whole
    spread, hosted = sharers(layout), layout.offload_param != "none"
    still = 0 if layout.checkpointing else line.still
    return _cached_layers(line, layout.element_bytes, layout.persistence, layout.prefetch, spread, hosted, still)


class _Layers:
    """Layers and whether their parameters stay gathered from forward to backward (`__params_to_release`).

    A module's parameters are released after it, unless the trace uses them again within the reuse distance; between
    a layer's forward and its backward lies twice what follows it. Without other ranks nothing is gathered. The first
    `still` layers have no backward: so it was seen beside frozen weights, but not where blocks are checkpointed.
    bitsandbytes' products keep the gathered bytes of their weights as attributes of their nodes, checkpointed or not,
    and so these outlive their release until the graph is dropped (autograd/_functions.py, MatMul4Bit).
    """

    def __init__(
        self,
        line: StageTimeline,
        element: int,
        persistence: int,
        prefetch: int,
        spread: ParameterSharers,
        hosted: bool,
        still: int,
    ):
        self.element, self.persistence, self.prefetch = element, persistence, prefetch
        self.spread, self.hosted, self.still = spread, hosted, still
        every = [(*packed, *layer) for packed, layer in zip(line.packed, line.layers, strict=True)]
        self.members = [[p for p in layer if self.gathers(p)] for layer in every]
        totals = [sum(p.numel for p in layer) for layer in every]
        following, self.kept = 0, [False] * len(totals)
        for n in reversed(range(len(totals))):
            self.kept[n] = 2 * following < REUSE_ELEMENTS and n >= still
            following += totals[n]
        self.experts = any(p.expert for layer in line.layers for p in layer)
        sizes = [self._bytes(layer) for layer in self.members]
        self.needed = list(accumulate(sizes, initial=0))
        self.packed = [sum(p.numel for p in layer if p.packed) for layer in self.members]
        staying = [size if kept else bits for size, kept, bits in zip(sizes, self.kept, self.packed, strict=True)]
        self.earlier = list(accumulate(staying, initial=0))

    def fetched_ahead(self, layer: int, released: int = 0) -> int:
        """Count what is gathered once the layers up to one are all that are still needed, where experts are spread.

        Each module fetches ahead, and one has all experts in three parameters: so fetching runs through the layers
        until it meets its limit, and what it has passed stays (:649).
        """
        return min(self.element * LIVE_ELEMENTS, self.needed[layer + 1] - released) if self.experts else 0

    def fetched_past(self, layer: int) -> int:
        """Count what is gathered at most in the forward of a layer that has no backward: all from it on.

        Each module fetches ahead, those without parameters too, and so fetching runs away from releasing until the
        limit, which the last parameter may pass (:447). The first layer of a model is an embedding of few modules.
        """
        if not 0 < layer < self.still:
            return 0
        largest = max((p.bytes(self.element) for members in self.members[layer:] for p in members), default=0)
        return min(self.element * LIVE_ELEMENTS + largest, self.needed[-1] - self.needed[layer])

    def inside(self, layer: int, whole: bool, forward: bool = False) -> int:
        """Count the bytes of a layer's own parameters that are gathered at once: one in use, those fetched ahead.

        `whole`: all of them are. In forward packed ones that were used before are still there.
        """
        members = self.members[layer]
        if whole:
            return self._bytes(members)
        most = used = 0
        for place, parameter in enumerate(members):
            ahead = self._bytes(self._ahead(members[place + 1 :]))
            most = max(most, used + parameter.bytes(self.element) + ahead)
            used += parameter.numel if forward and parameter.packed else 0
        return most

    def outliving(self, layer: int) -> int:
        """Count the bytes of packed weights that a layer's backward finds beside those that are gathered for it."""
        return sum(self.packed[layer + 1 :]) + (0 if self.kept[layer] else self.packed[layer])

    def gathers(self, parameter: Parameter) -> bool:
        """Return whether a parameter is gathered and released: it is spread over ranks, and too large to stay."""
        return parameter.numel > self.persistence and (self.hosted or self.spread.of(parameter) > 1)

    def at_once(self, layer: int, fewest: int) -> int:
        """Count the bytes of the largest all-gather of `fewest` parameters or more: one in use, or those ahead."""
        members = self.members[layer]
        groups = [[p] for p in members] + [self._ahead(members[place:]) for place in range(len(members))]
        return max((self._bytes(group) for group in groups if len(group) >= fewest), default=0)

    def _ahead(self, members: Sequence[Parameter]) -> list[Parameter]:
        """Return parameters that are fetched together, until they reach the prefetch size (:447)."""
        ahead: list[Parameter] = []
        fetched = 0
        for parameter in members:
            if fetched >= self.prefetch:
                break
            ahead.append(parameter)
            fetched += parameter.numel
        return ahead

    def _bytes(self, members: Iterable[Parameter]) -> int:
        return sum(p.bytes(self.element) for p in members)


_cached_layers = lru_cache(maxsize=1024)(_Layers)
