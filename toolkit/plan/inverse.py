"""The questions the other way round: the largest that fits, and how few devices it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import Profile

MOST_GPUS = 65536


def largest(pressure: Callable[[int], float], smallest: int, step: int, most: int) -> tuple[int | None, int]:
    """The largest of smallest, smallest + step, ... at which the growing `pressure` is at most 1; and the looks taken.

    None where not even the smallest is. The next one after the answer has been looked at too and is above 1, unless the
    answer is the last below `most`. Pressures are nearly lines, so the next guess is where the line through the
    bracket's ends reaches 1; every second guess halves the bracket.
    """
    seen: dict[int, float] = {}

    def at(n: int) -> float:
        return seen.setdefault(n, pressure(smallest + n * step)) if n not in seen else seen[n]

    last = (most - smallest) // step
    if at(0) > 1:
        return None, len(seen)
    low, high = 0, 1
    while high <= last and at(high) <= 1:
        low, high = high, min(max(2 * high, _crossing(seen, low, high)), last + 1) if high < last else last + 1
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        if turn % 2 == 0 and high in seen:
            middle = min(max(_crossing(seen, low, high), low + 1), high - 1)
        low, high = (middle, high) if at(middle) <= 1 else (low, middle)
        turn += 1
    return smallest + low * step, len(seen)


def _crossing(seen: dict[int, float], low: int, high: int) -> int:
    """Where the line through two pressures reaches 1; at most 64 times as far as was looked."""
    slope = (seen[high] - seen[low]) / (high - low)
    if slope <= 0:
        return 2 * high
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


def gpu_counts(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(devices of a node, nodes), ascending: 1, 2, 3, 4, 6, 8, 12, ... up to a full node, then as many nodes."""
    counts = [n for power in range(17) for n in (2**power, 3 * 2**power // 2) if n == 2**power or power]
    within = sorted(n for n in counts if n < cluster.gpus)
    yield from ((n, 1) for n in within)
    yield from ((cluster.gpus, n) for n in sorted(counts) if n * cluster.gpus <= MOST_GPUS)
