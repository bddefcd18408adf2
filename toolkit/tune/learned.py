"""The planner's step times, corrected by trials: how the logarithm of measured / forecast depends on the knobs.

A Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3): before any trial
every forecast may be off by a common factor and by less for each knob; each trial narrows that down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerofit.plan.choice import Choice

COMMON, EACH = 1.0, 0.3  # standard deviations before any trial: of the common factor's logarithm, and of each knob's
NOISE = 0.03  # of a measurement's logarithm, and of what the knobs do not explain


def features(choice: Choice) -> np.ndarray:
    """float64 (features,): 1 for the common factor, and what the planner may be wrong about in a way of its own."""
    stages = [float(choice.zero_stage == stage) for stage in (1, 2, 3)]
    places = [float(choice.offload_optimizer != "none"), float(choice.offload_param != "none")]
    degrees = [math.log2(degree) for degree in (choice.tp, choice.pp, choice.sp)]
    sizes = [math.log2(choice.micro_batch) / 3, math.log2(choice.accumulation) / 3]
    return np.array([1.0, *stages, *places, *degrees, *sizes, float(choice.checkpointing), float(choice.overlap)])


class Learned:
    """Step times as they are expected now."""

    def __init__(self, measured: Sequence[tuple[Choice, float, float]]):
        """`measured`: configurations with their forecast and measured step times in seconds."""
        size = len(features(Choice(zero_stage=0, micro_batch=1)))
        precision = np.diag(1 / np.array([COMMON, *[EACH] * (size - 1)]) ** 2)
        weighted = np.zeros(size)
        for choice, forecast_s, measured_s in measured:
            row = features(choice)
            precision += np.outer(row, row) / NOISE**2
            weighted += row * math.log(measured_s / forecast_s) / NOISE**2
        self._covariance = np.linalg.inv(precision)
        self._mean = self._covariance @ weighted

    def expected(self, choice: Choice, forecast_s: float) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of the step time in seconds."""
        row = features(choice)
        return math.log(forecast_s) + float(row @ self._mean), math.sqrt(float(row @ self._covariance @ row) + NOISE**2)
