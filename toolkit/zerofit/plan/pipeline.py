"""Pipeline stages: how layers are cut, and what the engine holds (DeepSpeed 0.19.8, runtime/pipe/engine.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import Point, StageTimeline
from zerofit.spec.profile import Profile


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


def in_flight(line: StageTimeline, layout: PlannedLayout, stage: int) -> Iterator[tuple[PlannedLayout, Point]]:
    """Yield kinds of passes of a stage, and the bytes held besides those of the current micro batch.

    One forward, one backward: stage s of p has p - s micro batches in flight at most. While they are the step's first
    there are no gradients yet; one fewer is in flight when there are.
    """
    most = most_in_flight(layout, stage)
    if layout.accumulation > most:
        yield layout, _in_flight_bytes(line, most)
        return
    yield replace(layout, accumulation=1), _in_flight_bytes(line, most)
    if most > 1:
        yield layout, _in_flight_bytes(line, most - 1)


def most_in_flight(layout: PlannedLayout, stage: int) -> int:
    """Return how many micro batches have gone forward through a stage and not yet back, at most."""
    return min(layout.pp - stage, layout.accumulation)


def idle(line: StageTimeline) -> Point:
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
    between = idle(line)

    def total(n: int) -> float:
        return between[n] + (micro_batches - 1) * line.saved[n] + own * line.received[n]

    return total(0), total(1)


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
        heaviest, lightest = max(heaviest, mine), min(lightest, mine)
        if heaviest - lightest <= cost:
            cost, found = heaviest - lightest, (cut, (heaviest, lightest))
    return found
