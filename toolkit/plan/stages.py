"""How a pipeline cuts a run of layers: contiguous stages, balanced by parameters as DeepSpeed balances them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zerofit.spec.profile import Profile


def stage_cuts(weights: Sequence[int], stages: int) -> list[int]:
    """Boundaries of `stages` contiguous parts whose heaviest is as light as possible: `[0, ..., len(weights)]`.

    The smallest bottleneck is found by bisection, then parts are filled from the left
    (deepspeed/runtime/utils.py, partition_balanced).
    """
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _parts(weights, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return _filled(weights, low, stages)


def stages_of(profile: Profile, pp: int) -> list[list[tuple[int, int]]]:
    """For each stage, which layers it has: (index in profile.layers, how many of that run)."""
    flat = [index for index, layer in enumerate(profile.layers) for _ in range(layer.count)]
    sizes = [sum(layer.matrices) + sum(layer.vectors) for layer in profile.layers]
    cuts = stage_cuts([sizes[index] for index in flat], pp)
    stages = []
    for begin, end in pairwise(cuts):
        mine = flat[begin:end]
        stages.append([(index, mine.count(index)) for index in sorted(set(mine))])
    return stages


def _parts(weights: Sequence[int], bottleneck: int) -> int:
    parts, load = 1, 0
    for weight in weights:
        if load + weight > bottleneck:
            parts, load = parts + 1, 0
        load += weight
    return parts


def _filled(weights: Sequence[int], bottleneck: int, stages: int) -> list[int]:
    ends = list(accumulate(weights))
    cuts, done = [0], 0
    for stage in range(1, stages):
        end = cuts[-1]
        while end < len(weights) - (stages - stage) and ends[end] - done <= bottleneck:
            end += 1
        cuts.append(max(end, cuts[-1] + 1))
        done = ends[cuts[-1] - 1]
    return [*cuts, len(weights)]
