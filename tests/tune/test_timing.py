"""The mean step time of a run that is going on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from zerofit.tune.trial import CHUNK_S, FEWEST, timing


def test_the_first_steps_and_seconds_do_not_count():
    assert timing([5.0, 1.0, 1.0]) is None
    assert timing([5.0, 1.0, 1.0, 0.1]).step_s == pytest.approx(0.1)
    assert timing([0.1] * 20) is None  # two seconds
    assert timing([]) is None


def test_too_little_says_that_it_is_not_sure():
    found = timing([1.0, 1.0, 1.0, *[0.1] * 10])
    assert (found.spread, found.steps) == (math.inf, 10)


def test_the_interval_is_students():
    rng = np.random.default_rng(1)
    steps = rng.normal(CHUNK_S, 0.05, 12).clip(CHUNK_S)  # each a piece of its own
    found = timing([1.0, 1.0, 1.0, *steps])
    low, high = stats.t.interval(0.95, len(steps) - 1, loc=steps.mean(), scale=stats.sem(steps))
    assert found.step_s == pytest.approx(steps.mean())
    assert found.spread == pytest.approx((high - low) / 2 / steps.mean())


def test_the_interval_holds_the_truth():
    rng = np.random.default_rng(2)
    right = 0
    for _ in range(300):
        steps = rng.gamma(20, 0.05 / 20, 400)
        found = timing([1.0, 1.0, 1.0, *steps])
        assert len(steps) * 0.05 / CHUNK_S > FEWEST
        right += abs(found.step_s - 0.05) <= found.spread * found.step_s
    assert 0.9 <= right / 300 <= 0.99
