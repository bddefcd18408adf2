"""The order in which a rank's layers allocate in forward and backward, for the memory forecast.

Nothing here depends on the ZeRO stage, the micro batch or the number of data parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zerofit.spec.precision import ELEMENT_BYTES
from zerofit.spec.profile import BackwardMoment, LayerCost, LayerRun, Linear, Profile

# of many equal layers, these of the last and the first; the rest lie between them (see `_told_apart`)
_LAST, _FIRST = 3, 1

Point = tuple[float, float]  # bytes: fixed, per sample


class Parameter(NamedTuple):
    """One parameter of a rank, as the optimizer's two groups hold it (train/build.py, parameter_groups)."""

    numel: int
    group: int  # 0: matrices, 1: vectors
    start: int  # elements before it in its group
    split: bool = False  # tensor parallel ranks have a part each


class TimelineEvent(NamedTuple):
    """A stretch of the backward, up to a parameter's complete gradient; bytes above parameters and done gradients."""

    live: tuple[Point, ...]  # the largest holds
    end: Point
    done: int  # elements whose gradients were complete before it
    parameter: Parameter | None
    layer: int  # place in the timeline's layers


@dataclass(frozen=True, eq=False)
class StageTimeline:
    """One pipeline stage's layers on one rank; compared by identity, so that what is derived of it can be cached."""

    layers: tuple[tuple[Parameter, ...], ...]  # in the order of the forward
    forward: tuple[tuple[int, Point, tuple[Point, ...]], ...]  # layer, what is alive before and in its forward
    backward: tuple[TimelineEvent, ...]
    saved: Point  # of one micro batch, once its forward is done
    buffers_bytes: int
    received: Point = (0.0, 0.0)  # activation that comes from the stage before
    sent: Point = (0.0, 0.0)  # activation that goes to the next stage
    logits: Point = (0.0, 0.0)  # what the last stage puts out

    @cached_property
    def members(self) -> tuple[tuple[Parameter, ...], ...]:
        """The optimizer's groups, matrices and vectors, in the model's order."""
        every = [parameter for layer in self.layers for parameter in layer]
        return tuple(tuple(p for p in every if p.group == group) for group in (0, 1))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numels of the groups."""
        return tuple(tuple(p.numel for p in group) for group in self.members)

    @cached_property
    def parameters(self) -> int:
        """Elements."""
        return sum(map(sum, self.groups))

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((max(group, default=0) for group in self.groups), default=0)


def timeline(profile: Profile, key: str, bounds: tuple[int, int] | None = None) -> StageTimeline:
    """The layers from bounds[0] to below bounds[1] (of all, each counted) in the setting `key`; None: the whole model.

    Raises KeyError where the profile has no such setting.
    """
    expanded = [
        _Placed(layer, cost)
        for layer, cost in zip(profile.layers, profile.costs[key], strict=True)
        for _ in range(layer.count)
    ]
    first, last = bounds or (0, len(expanded))
    mine = _stand_alone(expanded, first, last, ELEMENT_BYTES[key.split("/")[0]])
    layers, bases = _in_groups(mine), _bases(mine)
    told = _told_apart(mine)
    return StageTimeline(
        layers=layers,
        forward=tuple((n, bases[n], _raised(_forward(mine[n]), bases[n])) for n in told),
        backward=tuple(_backward(mine, layers, bases, told)),
        saved=bases[-1],
        buffers_bytes=sum(placed.layer.buffers_bytes for placed in mine),
        received=_point(expanded[first - 1].cost.output_bytes) if first else (0.0, 0.0),
        sent=_point(expanded[last - 1].cost.output_bytes) if last < len(expanded) else (0.0, 0.0),
        logits=_point(expanded[last - 1].cost.output_bytes) if last == len(expanded) else (0.0, 0.0),
    )


class _Placed:
    """A layer with its costs, and the numels of one rank: matrices, vectors, then matrices tied to another stage's."""

    def __init__(self, layer: LayerRun, cost: LayerCost, tied: tuple[int, ...] = (), shift: float = 0.0):
        self.layer, self.cost = layer, cost
        matrices, vectors = cost.matrices or layer.matrices, cost.vectors or layer.vectors
        whole = layer.matrices + layer.vectors
        self.numels = matrices + vectors + tied
        self.group_of = (0,) * len(matrices) + (1,) * len(vectors) + (0,) * len(tied)
        self.split = tuple(n < w for n, w in zip(self.numels, whole, strict=False)) + (False,) * len(tied)
        self.shift = shift  # bytes that its backward holds more than in the trace


def _stand_alone(expanded: list[_Placed], first: int, last: int, element_bytes: int) -> list[_Placed]:
    """A stage's layers; a tied matrix that another stage has is its own here (pipe/module.py, TiedLayerSpec).

    In the whole model the tied matrix's first gradient waits through the whole backward for the second one.
    """
    head = expanded[-1]
    if head.layer.tied_to is None or (first == 0 and last == len(expanded)):
        return expanded[first:last]
    tied = max(expanded[0].numels)
    mine = [_Placed(p.layer, p.cost, shift=-tied * element_bytes) for p in expanded[first:last]]
    if last == len(expanded):
        mine[-1] = _Placed(head.layer, head.cost, tied=(tied,))
    return mine


def _in_groups(mine: Sequence[_Placed]) -> tuple[tuple[Parameter, ...], ...]:
    """Each layer's parameters with their places in the optimizer's groups."""
    layers, ends = [], [0, 0]
    for placed in mine:
        layers.append([])
        for numel, group, split in zip(placed.numels, placed.group_of, placed.split, strict=True):
            layers[-1].append(Parameter(numel, group, ends[group], split))
            ends[group] += numel
    return tuple(map(tuple, layers))


def _bases(mine: Sequence[_Placed]) -> list[Point]:
    """What earlier layers have saved before each layer's forward, and in all."""
    bases = [(0.0, 0.0)]
    for placed in mine:
        saved = placed.cost.saved_bytes
        bases.append((bases[-1][0] + saved.fixed, bases[-1][1] + saved.per_sample))
    return bases


def _told_apart(mine: Sequence[_Placed]) -> list[int]:
    """Layers to look at: of a run of equal ones, what is alive changes by the same amount from each to the next.

    So the most is alive in the first or in the last of them; a few of the last show how buckets fill.
    """
    told = []
    for n, placed in enumerate(mine):
        before = next((k for k in range(n, -1, -1) if mine[k].layer is not placed.layer), -1)
        after = next((k for k in range(n, len(mine)) if mine[k].layer is not placed.layer), len(mine))
        if n - before <= _FIRST or after - n <= _LAST:
            told.append(n)
    return told


def _backward(
    mine: Sequence[_Placed], layers: Sequence[Sequence[Parameter]], bases: Sequence[Point], told: Sequence[int]
) -> Iterator[TimelineEvent]:
    after = [sum(placed.numels) for placed in mine]
    for n in reversed(told):
        done = sum(after[n + 1 :])
        for moment in _moments(mine[n]):
            parameter = None if moment.parameter is None else layers[n][moment.parameter]
            base = (bases[n][0] + mine[n].shift, bases[n][1])
            end = (base[0] + moment.end.fixed, base[1] + moment.end.per_sample)
            yield TimelineEvent(_raised(moment.live, base), end, done, parameter, n)
            done += parameter.numel if parameter else 0


def _moments(placed: _Placed) -> Iterator[BackwardMoment]:
    """The traced moments; without a trace the peak comes before all gradients, which are complete one by one."""
    cost = placed.cost
    yield from cost.backward or (BackwardMoment(live=(cost.backward_peak_bytes,)),)
    traced = {moment.parameter for moment in cost.backward}
    for place in reversed(range(len(placed.numels))):
        if place not in traced:
            yield BackwardMoment(live=(), parameter=place)


def _forward(placed: _Placed) -> tuple[Linear, ...]:
    return placed.cost.forward or (placed.cost.forward_peak_bytes,)


def _raised(lines: Sequence[Linear], base: Point) -> tuple[Point, ...]:
    return tuple((line.fixed + base[0], line.per_sample + base[1]) for line in lines)


def _point(line: Linear) -> Point:
    return line.fixed, line.per_sample
