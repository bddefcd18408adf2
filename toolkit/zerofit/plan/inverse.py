"""Find the largest value that fits, and the fewest devices that suffice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from zerofit.spec.profile import Profile

MOST_GPUS = 65536


# Memory grows with the length of a sequence, the micro batch and the number of layers. So the largest
# value that fits is bracketed by doubling, and the bracket is narrowed by lines and halves. `pressure` is a function
# that returns the share of the scarcest memory that a value needs. A value with a share above 1 does not fit.
def largest(
    pressure: Callable[[int], float], smallest: int, step: int, most: int, end_first: bool = False
) -> tuple[int | None, int]:
    """Return the largest value that fits, and the number of evaluations of `pressure`.

    The candidates are `smallest`, `smallest + step`, ..., up to `most`. A value fits if its `pressure` is at most 1.
    `pressure` must grow with the value. If `smallest` does not fit, the returned value is None.
    `end_first`: whether the search tries the last candidate second. `pressure` was also evaluated for the candidate
    after the result, unless the result is the last candidate.
    """
    seen: dict[int, float] = {}

    def fits(n: int) -> bool:
        if n not in seen:
            seen[n] = pressure(smallest + n * step)
        return seen[n] <= 1

    last = (most - smallest) // step
    if not fits(0):
        return None, len(seen)
    # larger candidates until one does not fit: then the result is in a bracket
    low, high = 0, last if end_first else min(1, last)
    while fits(high):
        if high == last:
            return smallest + last * step, len(seen)
        low, high = high, min(max(2 * high, _crossing(seen, low, high) + 1), last)
    # `pressure` grows nearly linearly, so the next guess is where a line through the bracket's ends reaches 1. If this
    # guess does not halve the bracket, the next guess is its middle.
    halve = False
    while high - low > 1:
        width = high - low
        middle = low + width // 2 if halve else min(max(_crossing(seen, low, high), low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
        halve = not halve and high - low > width // 2
    return smallest + low * step, len(seen)


def _crossing(seen: dict[int, float], low: int, high: int) -> int:
    """Return where a line through two evaluated values reaches a pressure of 1."""
    slope = (seen[high] - seen[low]) / (high - low)
    if not 0 < slope < math.inf:
        return (low + high) // 2 if slope > 0 else 2 * high
    # a flat line would lead far beyond values that can be evaluated
    return min(int(low + (1 - seen[low]) / slope), 64 * high)


def with_layers(profile: Profile, count: int) -> Profile:
    """Return the profile with `count` copies of the repeated layer, also in engines' own models."""
    index = repeated_layer(profile)
    layers = list(profile.layers)
    layers[index] = replace(layers[index], count=count)
    own_models = {engine: with_layers(model, count) for engine, model in profile.own_models.items()}
    return replace(profile, layers=tuple(layers), own_models=own_models)


def repeated_layer(profile: Profile) -> int:
    """Return the index of the most frequent layer."""
    return max(range(len(profile.layers)), key=lambda index: profile.layers[index].count)


def fewest(pressure: Callable[[int, int], float], full: int) -> tuple[int, int] | None:
    """Return the fewest (devices per node, nodes) with a `pressure` of at most 1.

    If several nodes are needed, all their devices are used. The search doubles the number of nodes until the pressure
    is low enough, then bisects. It assumes that more nodes never need more memory per device. Return None if four
    times as many nodes do not reduce the pressure, or if more than MOST_GPUS devices are needed.
    """
    for gpus in range(1, full + 1):
        if pressure(gpus, 1) <= 1:
            return gpus, 1
    pressures, nodes = [math.inf], 2
    while nodes * full <= MOST_GPUS:
        pressures.append(pressure(full, nodes))
        if pressures[-1] <= 1:
            low, high = nodes // 2, nodes
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if pressure(full, middle) <= 1 else (middle, high)
            return full, high
        if len(pressures) > 4 and pressures[-1] > 0.99 * pressures[-3]:
            return None
        nodes *= 2
    return None
