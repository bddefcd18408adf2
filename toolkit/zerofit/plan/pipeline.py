"""Pipeline stages: how layers are cut, and what the engine holds (DeepSpeed 0.19.8, runtime/pipe/engine.py)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from zerofit.plan.backward import upper
from zerofit.plan.dualpipev import EXCHANGE, order
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import NOTHING, Point, StageTimeline, add
from zerofit.spec.mesh import parts_of_stage, pipeline_parts
from zerofit.spec.profile import Profile

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


def stage_bounds(profile: Profile, stages: int) -> tuple[tuple[int, int], ...]:
    """Return first and last layer (exclusive, each of a run counted) of each stage, balanced by parameters.

    As train/pipeline.py has it cut by deepspeed.runtime.utils.partition_balanced. Raises ValueError for more stages
    than layers.
    """
    tied = max(profile.layers[0].matrices + profile.layers[0].frozen)
    every = [layer for layer in profile.layers for _ in range(layer.count)]
    trained = tuple(sum(layer.matrices) + sum(layer.vectors) for layer in every)
    weights = tuple(
        own + sum(layer.frozen + layer.quantized) + (tied if layer.tied_to else 0)
        for layer, own in zip(every, trained, strict=True)
    )
    if stages > len(weights):
        raise ValueError(f"{profile.model} has {len(weights)} layers, too few for {stages} pipeline stages")
    bounds = _balanced(weights, stages)
    if all(sum(trained[first:last]) for first, last in bounds):
        return bounds
    return _balanced(trained, stages)  # a stage must train something: train/pipeline.py, _bounds


def stage_parts(profile: Profile, layout: PlannedLayout) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each stage the first and last layer of its parts, as `stage_bounds`."""
    bounds = stage_bounds(profile, pipeline_parts(layout.pp, layout.schedule))
    every = (parts_of_stage(stage, layout.pp, layout.schedule) for stage in range(layout.pp))
    return tuple(tuple(bounds[part] for part in parts) for parts in every)


class Pass(NamedTuple):
    """A kind of forward or backward, and what it finds."""

    line: StageTimeline
    direction: Direction
    beside: Point = NOTHING  # bytes besides those of its own micro batch
    graded: int = 0  # elements with gradients where these wait for the last micro batch: at stages 0 and 1


def in_flight(lines: Sequence[StageTimeline], layout: PlannedLayout, stage: int) -> tuple[list[Pass], Point]:
    """Return the kinds of passes of a stage, and the bytes that stay between steps; `lines`: of each part.

    One forward, one backward: stage s of p has p - s micro batches in flight at most. While they are the step's first
    there are no gradients yet; one fewer is in flight when there are.
    """
    if layout.schedule == "dualpipev":
        return _followed(lines, layout, stage)
    (line,), (most,) = lines, most_in_flight(layout, stage)
    found = [(most, line.parameters)] if layout.accumulation > most else [(most, 0), (most - 1, line.parameters)]
    passes = [
        Pass(line, direction, _in_flight_bytes(line, micro_batches), graded)
        for micro_batches, graded in found
        for direction in DIRECTIONS
        if micro_batches
    ]
    return passes, _idle(line)


def most_in_flight(layout: PlannedLayout, stage: int) -> tuple[int, ...]:
    """Return how many micro batches have gone forward through each part of a stage and not yet back, at most.

    In DualPipeV 2p + 1 in all, as those of the second part's are one more than before it.
    """
    if layout.schedule == "dualpipev":
        return 2 * layout.pp - stage, stage + 1
    return (min(layout.pp - stage, layout.accumulation),)


def _idle(line: StageTimeline) -> Point:
    """Return what stays between steps: a buffer to receive activations (:1123), one for their gradients (:1180).

    The last stage keeps the logits, inputs and inputs' gradients of its two buffers until they are used again (:751).
    """
    logits, inputs = (2.0, 4.0) if line.logits[1] else (0.0, 0.0)

    def kept(n: int) -> float:
        return line.received[n] + line.sent[n] + logits * line.logits[n] + inputs * line.received[n]

    return kept(0), kept(1)


def _in_flight_bytes(line: StageTimeline, micro_batches: int) -> Point:
    """Add up micro batches; each has its input twice: as received (:1128), and as the forward took it (:705)."""
    own = 0 if line.logits[1] else 2 * micro_batches  # the last stage's are in its two buffers
    between = _idle(line)

    def total(n: int) -> float:
        return between[n] + (micro_batches - 1) * line.saved[n] + own * line.received[n]

    return total(0), total(1)


def _followed(lines: Sequence[StageTimeline], layout: PlannedLayout, stage: int) -> tuple[list[Pass], Point]:
    """Follow DualPipeV's order (runtime/pipe/dualpipev.py); with one micro batch more than fill it all comes."""
    walk = _Walk(lines)
    for word in order(layout.pp, stage, min(layout.accumulation, 2 * layout.pp + 1)):
        walk.follow(word)
    kinds = defaultdict[tuple, list[Pass]](list)
    for one in walk.passes:
        kinds[one.line.received, one.line.sent, one.direction, one.graded].append(one)
    most = (upper(same, lambda one: (one.beside[1], one.beside[0])) for same in kinds.values())
    return [one for same in most for one in same], walk.held


class _Walk:
    """What a stage holds on its way through DualPipeV's order."""

    def __init__(self, lines: Sequence[StageTimeline]):
        self.passes: list[Pass] = []
        self.held, self._graded, self._lines = NOTHING, 0, lines
        self._gradient = NOTHING  # with which the last backward began that was not the loss's (engine.py, grad_layer)

    def follow(self, word: str) -> None:
        """Go on by one word of the order."""
        if word == EXCHANGE:
            return
        line = self._lines[int(word.strip("<>FB"))]
        if word[0] == "<":
            self._hold(line.received if word[1] == "F" else line.sent)
        elif word[0] == "F" and len(word) == 2:
            self._hold(line.received)  # the forward takes a copy (engine.py:705)
            self.passes.append(Pass(line, "forward", self.held, self._graded))
            self._hold(add(line.saved, line.logits))
        elif word[0] == "B" and len(word) == 2:
            self._backward(line)
        elif word[0] == "B":  # the input and its gradient are not kept
            self._hold(line.received, -2)

    def _backward(self, line: StageTimeline) -> None:
        """Go back: the input's copy goes, its gradient comes, with which the last stage's first part begins."""
        if line.sent != NOTHING:
            self._hold(self._gradient, -1)
            self._gradient = line.sent
        self._hold(line.saved, -1)
        self.passes.append(Pass(line, "backward", self.held, self._graded))
        self._hold(line.logits, -1)
        self._graded = max(self._graded, line.graded)

    def _hold(self, size: Point, times: int = 1) -> None:
        self.held = self.held[0] + times * size[0], self.held[1] + times * size[1]


@lru_cache(maxsize=256)
def _balanced(weights: tuple[int, ...], stages: int) -> tuple[tuple[int, int], ...]:
    """Cut with the least difference between the heaviest and the lightest stage, ties cut as late as possible.

    The same dynamic programme as DeepSpeed's, over (heaviest, lightest) of the best cut of the first layers.
    """
    sums = list(accumulate(weights, initial=0))
    best: list[tuple[float, float]] = [(0, math.inf), *[(math.inf, math.inf)] * len(weights)]
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        found = [_best_cut(best, sums, end) if end >= stage else (0, (math.inf, math.inf)) for end in range(len(sums))]
        cuts.append([cut for cut, _ in found])
        best = [value for _, value in found]
    bounds, end = [], len(weights)
    for cut in reversed(cuts):
        bounds.append((cut[end], end))
        end = cut[end]
    return tuple(reversed(bounds))


def _best_cut(best: Sequence[tuple[float, float]], sums: Sequence[int], end: int) -> tuple[int, tuple[float, float]]:
    """Return where the last of the stages over the first `end` layers begins, and the heaviest and lightest stage."""
    cost, found = math.inf, (0, (math.inf, math.inf))
    for cut in range(end):
        heaviest, lightest = best[cut]
        if heaviest == math.inf:
            continue
        mine = sums[end] - sums[cut]
        if mine > heaviest:  # the innermost loop of a plan: max and min would take twice as long
            heaviest = mine
        if mine < lightest:
            lightest = mine
        if heaviest - lightest <= cost:
            cost, found = heaviest - lightest, (cut, (heaviest, lightest))
    return found
