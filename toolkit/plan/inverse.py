"""The questions the other way round: the largest that fits, and how few devices it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from zerofit.spec.profile import Profile

MOST_GPUS = 65536


def largest(
    pressure: Callable[[int], float], smallest: int, step: int, most: int, end_first: bool = False
) -> tuple[int | None, int]:
    """The largest of smallest, smallest + step, ... at which the growing `pressure` is at most 1; and the looks taken.

    None where not even the smallest is. The one after the answer has been looked at too and is above 1, unless the
    answer is the last up to `most`. Pressures are nearly lines, so the next guess is where the line through the
    bracket's ends reaches 1; where that does not halve the bracket, the middle is next. With `end_first` the last one
    is looked at early: it may well be the answer.
    """
    seen: dict[int, float] = {}

    def fits(n: int) -> bool:
        if n not in seen:
            seen[n] = pressure(smallest + n * step)
        return seen[n] <= 1

    last = (most - smallest) // step
    if not fits(0):
        return None, len(seen)
    low, high = 0, last if end_first else min(1, last)
    while fits(high):
        if high == last:
            return smallest + last * step, len(seen)
        low, high = high, min(max(2 * high, _crossing(seen, low, high) + 1), last)
    halve = False
    while high - low > 1:
        width = high - low
        middle = low + width // 2 if halve else min(max(_crossing(seen, low, high), low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
        halve = not halve and high - low > width // 2
    return smallest + low * step, len(seen)


def _crossing(seen: dict[int, float], low: int, high: int) -> int:
    """Where the line through two pressures reaches 1; at most 64 times as far as was looked."""
    slope = (seen[high] - seen[low]) / (high - low)
    if not 0 < slope < math.inf:
        return (low + high) // 2 if slope > 0 else 2 * high
    return min(int(low + (1 - seen[low]) / slope), 64 * high)


def with_layers(profile: Profile, count: int) -> Profile:
    """The profile with another number of its repeated layer."""
    index = repeated_layer(profile)
    layers = list(profile.layers)
    layers[index] = replace(layers[index], count=count)
    return replace(profile, layers=tuple(layers))


def repeated_layer(profile: Profile) -> int:
    """Place of the layer of which there are most."""
    return max(range(len(profile.layers)), key=lambda index: profile.layers[index].count)


def gpu_counts(full: int) -> Iterator[tuple[int, int]]:
    """(devices of a node, nodes), ascending: 1, 2, 3, 4, 6, 8, 12, ... up to a node's `full`, then as many nodes."""
    counts = sorted({2**n for n in range(17)} | {3 * 2**n for n in range(16)})
    yield from ((n, 1) for n in counts if n < full)
    yield from ((full, n) for n in counts if n * full <= MOST_GPUS)
