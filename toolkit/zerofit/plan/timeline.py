"""Order the allocations of a rank's layers in forward and backward.

This order is independent of the ZeRO stage, the micro batch and the number of data parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.profile import BackwardMoment, LayerCost, LayerRun, Linear, ModuleCall, Profile, Scored, expert_degree

# number of last and of first layers that are kept of many equal layers (see `_representatives`)
_LAST, _FIRST = 3, 1

Point = tuple[float, float]  # bytes: fixed, per sample
NOTHING: Point = (0.0, 0.0)


def add(point: Point, other: Point, times: float = 1) -> Point:
    """Return `point` plus `times` times `other`: fixed bytes, and bytes per sample."""
    return point[0] + times * other[0], point[1] + times * other[1]


FROZEN = 2
EXPERTS = 3  # the first group of experts, which DeepSpeed separates from the matrices
EXPERT_GROUP_ELEMENTS = 178_956_971  # limit of a group of two or more experts (moe/utils.py, max_group_size)


class Parameter(NamedTuple):
    """One parameter of a rank, as the optimizer groups it (models/build.py, parameter_groups)."""

    numel: int
    group: int  # 0: matrices or all, 1: vectors, FROZEN: not in the optimizer, EXPERTS and above: experts
    start: int  # elements before it in its group
    split: bool = False  # whether tensor parallelism splits it
    packed: bool = False  # quantized: its elements are bytes, whatever the precision
    copied: bool = False  # a copy of another pipeline stage's parameter, which is counted in the norm there

    @property
    def expert(self) -> bool:
        """Whether the parameter belongs to an expert. Fewer ranks have a copy of an expert."""
        return self.group >= EXPERTS

    def bytes(self, element: int) -> int:
        """Return the bytes of the parameter. `element`: bytes per element in the run's precision."""
        return self.numel if self.packed else element * self.numel


class TimelineEvent(NamedTuple):
    """The part of a backward up to the moment when a parameter's gradient is complete.

    Live bytes do not include parameters and complete gradients.
    """

    live: tuple[Point, ...]  # candidates for the peak
    end: Point
    done: int  # elements whose gradients were complete before it
    parameter: Parameter | None
    layer: int  # index in the timeline's layers


@dataclass(frozen=True, eq=False)
class StageTimeline:
    """The layers of one pipeline stage on one rank, and a micro batch's passes through a part.

    A stage has one part, or two parts with DualPipeV. Timelines compare by identity, so derived results can be
    cached.
    """

    layers: tuple[tuple[Parameter, ...], ...]  # of all parts, in the order of forward
    forward: tuple[tuple[int, Point, tuple[Point, ...]], ...]  # layer, live bytes before and during its forward
    backward: tuple[TimelineEvent, ...]
    saved: Point  # of one micro batch, after its forward through the part
    graded: int  # elements with complete gradients after its backward through the part
    buffers_bytes: int  # including quantized_bytes
    packed: tuple[tuple[Parameter, ...], ...]  # quantized weights of each layer, which only stage 3 divides
    quantized_bytes: int = 0  # including scales
    on_host: tuple[Point, ...] = ()  # of one micro batch, for each layer that saves activations to host memory
    received: Point = NOTHING  # activation from the part before
    sent: Point = NOTHING  # activation for the next part
    logits: Point = NOTHING  # output of the last part
    blocks: tuple[Point, ...] = ()  # the largest activation of each kind of layer
    ep: int = 1  # ranks among which the experts are divided
    factors: int = 0  # numbers that Adafactor keeps of full parameters
    still: int = 0  # number of first layers without a backward, since nothing up to them is trained
    calls: tuple[tuple[ModuleCall, ...], ...] = ()  # of each layer's forward; places are in `layers`, then in `packed`
    recomputed: tuple[bool, ...] = ()  # whether each layer's backward begins with a recomputed forward
    tied: bool = False  # whether the head uses the embedding's matrix
    scored: Scored = "never"
    width: int = 0  # of the model; 0: unknown

    @cached_property
    def members(self) -> tuple[tuple[Parameter, ...], ...]:
        """The parameters of each optimizer group (matrices, vectors, experts), in model order."""
        by_group: dict[int, list[Parameter]] = {0: [], 1: []}
        for parameter in (parameter for layer in self.layers for parameter in layer if parameter.group != FROZEN):
            by_group.setdefault(parameter.group, []).append(parameter)
        return tuple(tuple(sorted(by_group[group], key=attrgetter("start"))) for group in sorted(by_group))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements of each parameter, for each group."""
        return tuple(tuple(p.numel for p in group) for group in self.members)

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all trained parameters."""
        return sum(map(sum, self.groups))

    @cached_property
    def frozen(self) -> tuple[Parameter, ...]:
        """The parameters that are not trained."""
        return tuple(parameter for layer in self.layers for parameter in layer if parameter.group == FROZEN)

    @cached_property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return self.parameters + sum(parameter.numel for parameter in self.frozen)

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest trained parameter."""
        return max((max(group, default=0) for group in self.groups), default=0)


@lru_cache(maxsize=1024)
def timeline(
    profile: Profile,
    key: str,
    parts: tuple[tuple[int, int], ...] | None = None,
    part: int = 0,
    weight_decay: bool = True,
) -> StageTimeline:
    """Return the timeline of a stage for the setting `key`, with the passes through one part.

    `parts` has a range of layers (first, last + 1) for each part. Ranges count equal layers one by one. If `parts` is
    None, there is one part with all layers. Without `weight_decay`, all parameters except experts are one group.
    Raises KeyError if the profile has no such setting.
    """
    expanded = [
        _StageLayer(layer, cost)
        for layer, cost in zip(profile.layers, profile.costs_of(key), strict=True)
        for _ in range(layer.count)
    ]
    ranges = parts or ((0, len(expanded)),)
    stage = _untied(expanded, ranges, ELEMENT_BYTES[key.split("/")[0]])
    (first, last), start = ranges[part], sum(end - begin for begin, end in ranges[:part])
    indices = range(start, start + last - first)
    starts = list(accumulate((run.count for run in profile.layers), initial=0))
    layers = _in_groups(stage, weight_decay)
    chosen = [start + n for n in _representatives(stage[indices.start : indices.stop])]
    # bytes that the part's earlier layers have saved before each layer's forward, and in the end
    saved = accumulate((_point(stage[n].cost.saved_bytes) for n in indices), add, initial=NOTHING)
    bases = dict(zip((*indices, indices.stop), saved, strict=True))
    return StageTimeline(
        layers=layers,
        forward=tuple(
            (n, bases[n], _raised(stage[n].cost.forward or (stage[n].cost.forward_peak_bytes,), bases[n]))
            for n in chosen
        ),
        backward=tuple(_backward(stage, layers, bases, chosen)),
        saved=bases[indices.stop],
        graded=sum(placed.graded for placed in stage[indices.start :]),
        buffers_bytes=sum(placed.layer.buffers_bytes for placed in stage),
        packed=tuple(tuple(Parameter(n, FROZEN, 0, packed=True) for n in placed.layer.packed) for placed in stage),
        quantized_bytes=sum(placed.layer.quantized_bytes for placed in stage),
        on_host=tuple(_point(stage[n].cost.host_bytes) for n in indices if stage[n].cost.host_bytes != Linear()),
        received=_point(expanded[first - 1].cost.output_bytes) if first else NOTHING,
        ep=expert_degree(key),
        factors=sum(placed.layer.factors for placed in stage),
        still=next((n for n, placed in enumerate(stage) if placed.trained), 0),
        calls=tuple(_calls(placed, starts) for placed in stage),
        recomputed=tuple(placed.cost.recomputed for placed in stage),
        tied=stage[-1].layer.tied_to is not None,
        scored=profile.scored,
        width=profile.hidden_size or 0,
        sent=_point(expanded[last - 1].cost.output_bytes) if last < len(expanded) else NOTHING,
        logits=_point(expanded[last - 1].cost.output_bytes) if last == len(expanded) else NOTHING,
        blocks=tuple({_point(stage[n].cost.largest_bytes) for n in indices}),
    )


def _calls(placed: _StageLayer, starts: Sequence[int]) -> tuple[ModuleCall, ...]:
    """Return the module calls of a layer's forward."""
    if not placed.cost.calls:  # they were not traced: assume one module per parameter
        places = range(len(placed.numels) + len(placed.layer.packed))
        return tuple(ModuleCall(begins, (n,)) for n in places for begins in (True, False))
    return tuple(
        call._replace(others=tuple((starts[run], place) for run, place in call.others)) if call.others else call
        for call in placed.cost.calls
    )


class _StageLayer:
    """A layer of a pipeline stage, with its costs and the kind of each parameter."""

    def __init__(
        self,
        layer: LayerRun,
        cost: LayerCost,
        tied: tuple[int, ...] = (),
        shift: float = 0.0,
        frozen: tuple[int, ...] = (),
        early: int = 0,
    ):
        self.layer, self.cost = layer, cost
        matrices, vectors = cost.matrices or layer.matrices, cost.vectors or layer.vectors
        undivided = layer.matrices + layer.vectors
        frozen = layer.frozen + frozen
        self.numels = matrices + vectors + tied + frozen
        first = tuple(EXPERTS if index in cost.experts else 0 for index in range(len(matrices)))
        self.group_of = first + (1,) * len(vectors) + (0,) * len(tied) + (FROZEN,) * len(frozen)
        # with expert parallelism the weights differ from the full model's, but only experts are divided
        pairs = [(0, 0)] * len(matrices + vectors) if cost.experts else zip(matrices + vectors, undivided, strict=True)
        self.split = tuple(n < w for n, w in pairs) + (False,) * len(tied + frozen)
        self.copied = (False,) * len(matrices + vectors) + (True,) * len(tied) + (False,) * len(frozen)
        self.shift = shift  # additional bytes of its backward, relative to the trace
        self.early = early  # elements of a tied matrix whose gradient is in the head's backward, not the embedding's

    @property
    def trained(self) -> int:
        return sum(numel for numel, group in zip(self.numels, self.group_of, strict=True) if group != FROZEN)

    @property
    def graded(self) -> int:
        """The number of elements whose first gradients are complete after the layer's backward."""
        return self.trained + self.early


def _untied(expanded: list[_StageLayer], ranges: Sequence[tuple[int, int]], element_bytes: int) -> list[_StageLayer]:
    """Return a stage's layers, without memory that only the full model needs for a tied matrix."""
    head, stage = expanded[-1], [placed for first, last in ranges for placed in expanded[first:last]]
    if head.layer.tied_to is None or ranges[0] == (0, len(expanded)):
        return stage
    tied, one_matrix = max(expanded[0].numels), stage[0] is expanded[0]
    # If embedding and head are in two stages, the head's stage has a copy of the matrix (pipe/module.py,
    # TiedLayerSpec). If they are two parts of one stage, they share one matrix, and the backward of each part leaves
    # its own gradient.
    if tied in expanded[0].layer.frozen:  # it has no gradient
        own = stage[-1] is head and not one_matrix
        return [*stage[:-1], _StageLayer(head.layer, head.cost, frozen=(tied,))] if own else stage
    # The profile is of the full model, whose backward computes two gradients of the matrix. It keeps the first gradient
    # until the second exists, then allocates a third tensor for their sum. A pipeline neither keeps the first gradient
    # nor allocates the sum.
    size = tied * element_bytes
    untied = []
    for placed in stage:
        moments = (
            replace(moment, live=tuple(line for line in moment.live if line.fixed < 3 * size))
            for moment in placed.cost.backward
        )
        untied.append(_StageLayer(placed.layer, replace(placed.cost, backward=tuple(moments)), shift=-size))
    if stage[-1] is head and one_matrix:
        untied[0].early, untied[-1] = -tied, _StageLayer(head.layer, head.cost, early=tied)
    elif stage[-1] is head:
        untied[-1] = _StageLayer(head.layer, head.cost, tied=(tied,))
    return untied


def _in_groups(stage: Sequence[_StageLayer], weight_decay: bool) -> tuple[tuple[Parameter, ...], ...]:
    """Assign each layer's parameters to the optimizer's groups, in the model's order.

    In a group of all parameters, a layer's vectors come after its matrices: profiles have no other order.
    """
    layers: list[list[Parameter]] = [[] for _ in stage]
    ends: Counter[int] = Counter()
    experts = EXPERTS  # the group that is being filled
    # DeepSpeed flattens parameters in the order of model.parameters(), which is not always that of the forward.
    for n, placed in sorted(enumerate(stage), key=lambda pair: pair[1].layer.place):
        for numel, kind, split, copied in zip(placed.numels, placed.group_of, placed.split, placed.copied, strict=True):
            if kind == EXPERTS and ends[experts] and ends[experts] + numel > EXPERT_GROUP_ELEMENTS:
                experts += 1
            group = experts if kind == EXPERTS else 0 if kind == 1 and not weight_decay else kind
            layers[n].append(Parameter(numel, group, ends[group], split, copied=copied))
            ends[group] += numel
    return tuple(map(tuple, layers))


def _representatives(stage: Sequence[_StageLayer]) -> list[int]:
    """Choose the layers to evaluate: of equal layers, the first and the last few."""
    # Live bytes change linearly from one equal layer to the next, so their peak is in the first or in the last layer. A
    # few of the last layers show how buckets fill.
    chosen = []
    for n, placed in enumerate(stage):
        before = next((k for k in range(n, -1, -1) if stage[k].layer is not placed.layer), -1)
        after = next((k for k in range(n, len(stage)) if stage[k].layer is not placed.layer), len(stage))
        if n - before <= _FIRST or after - n <= _LAST:
            chosen.append(n)
    return chosen


def _backward(
    stage: Sequence[_StageLayer],
    layers: Sequence[Sequence[Parameter]],
    bases: Mapping[int, Point],
    chosen: Sequence[int],
) -> Iterator[TimelineEvent]:
    sizes = [placed.graded for placed in stage]
    for n in reversed(chosen):
        done = sum(sizes[n + 1 :])
        for moment in _moments(stage[n]):
            parameter = None if moment.parameter is None else layers[n][moment.parameter]
            base = add(bases[n], (stage[n].shift, 0.0))
            end = add(base, _point(moment.end))
            yield TimelineEvent(_raised(moment.live, base), end, done, parameter, n)
            done += parameter.numel if parameter else 0


def _moments(placed: _StageLayer) -> Iterator[BackwardMoment]:
    """Yield the traced moments of a layer's backward, then the gradients that were not traced."""
    cost = placed.cost
    yield from cost.backward or (BackwardMoment(live=(cost.backward_peak_bytes,)),)
    traced = {moment.parameter for moment in cost.backward}
    for index in reversed(range(len(placed.numels))):
        if index not in traced and placed.group_of[index] != FROZEN:
            yield BackwardMoment(live=(), parameter=index)


def _raised(lines: Sequence[Linear], base: Point) -> tuple[Point, ...]:
    return tuple(add(_point(line), base) for line in lines)


def _point(line: Linear) -> Point:
    return line.fixed, line.per_sample
