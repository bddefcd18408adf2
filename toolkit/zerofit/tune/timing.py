"""The mean step time of a run that is going on, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

WARM_STEPS, WARM_S = 3, 2.0  # left out: compilation, caches, clocks
CHUNK_S = 0.5  # steps are taken together to pieces of at least so long, which hardly depend on each other
FEWEST = 5  # pieces


class Timing(NamedTuple):
    """Mean seconds a step."""

    step_s: float
    spread: float  # half the 95 % confidence interval, as a share of the mean; inf where too little is known
    steps: int


def timing(step_times: Sequence[float]) -> Timing | None:
    """From the seconds of all steps of a run in their order; None while it is warming up."""
    warm = _warm(step_times)
    if not warm:
        return None
    sums: list[tuple[float, int]] = []
    seconds, count = 0.0, 0
    for one in warm:
        seconds, count = seconds + one, count + 1
        if seconds >= CHUNK_S:
            sums.append((seconds, count))
            seconds, count = 0.0, 0
    mean = sum(warm) / len(warm)
    if len(sums) < FEWEST:
        return Timing(mean, math.inf, len(warm))
    means = [seconds / count for seconds, count in sums]
    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    return Timing(mean, float(half / mean), len(warm))


def _warm(step_times: Sequence[float]) -> Sequence[float]:
    """The steps after the first few and the first seconds."""
    passed = 0.0
    for number, one in enumerate(step_times):
        if number >= WARM_STEPS and passed >= WARM_S:
            return step_times[number:]
        passed += one
    return ()
