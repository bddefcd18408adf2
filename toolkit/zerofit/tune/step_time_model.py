"""Correct the planner's step times by trials.

A Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3) models how
log(measured / forecast) depends on the settings. Before any trial, forecasts may be wrong by a common factor and by
smaller factors for each setting. Each trial narrows these factors down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zerofit.features.checkpointing import REPEATED
from zerofit.tune.trial import Candidate

# prior standard deviations of logarithms: of the common factor, of each setting's factor, of minor settings' factors
COMMON, EACH, LITTLE = 1.0, 0.3, 0.1
NOISE = 0.03  # standard deviation of a measurement's logarithm, with effects that the settings do not explain
USUAL_BUCKET = 50_000_000  # elements
FEWEST = 3  # measurements needed to predict each from the others
# settings for which the planner may have an error of its own
FEATURES: tuple[tuple[float, Callable[[Candidate], float]], ...] = (
    (COMMON, lambda c: 1.0),
    (EACH, lambda c: c.layout.zero_stage == 1),
    (EACH, lambda c: c.layout.zero_stage == 2),
    (EACH, lambda c: c.layout.zero_stage == 3),
    (EACH, lambda c: c.layout.offload_optimizer != "none"),
    (EACH, lambda c: c.layout.offload_param != "none"),
    (EACH, lambda c: math.log2(c.layout.tp)),
    (EACH, lambda c: math.log2(c.layout.pp)),
    (EACH, lambda c: math.log2(c.layout.sp)),
    (EACH, lambda c: math.log2(c.layout.ep)),
    # Divided by 3, a factor of 8 counts as much as one step of the other settings.
    (EACH, lambda c: math.log2(c.layout.micro_batch) / 3),
    (EACH, lambda c: math.log2(c.layout.accumulation) / 3),
    (EACH, lambda c: REPEATED[c.layout.checkpointing] - 1),
    (EACH, lambda c: c.layout.precision == "bf16"),
    (EACH, lambda c: c.layout.precision == "fp16"),
    (EACH, lambda c: c.compiled),
    (LITTLE, lambda c: c.layout.overlap),
    (LITTLE, lambda c: math.log10(c.layout.bucket / USUAL_BUCKET)),
    (LITTLE, lambda c: math.log10(1 + c.layout.persistence)),
)


def features(candidate: Candidate) -> np.ndarray:
    """Return the features as float64 (features,)."""
    return np.array([float(value(candidate)) for _, value in FEATURES])


# With features x of a configuration, measured time t, forecast f and noise s, the model is
#
#     log(t / f) = x w + e,    w ~ N(0, diag(prior^2)),    e ~ N(0, s^2)
#
# and the posterior of w after the trials is normal with
#
#     covariance C = (diag(prior^-2) + sum x x' / s^2)^-1,    mean C sum x log(t / f) / s^2    (Bishop, 3.50 and 3.51)
class StepTimeModel:
    """Step times expected after some measurements."""

    def __init__(self, measured: Sequence[tuple[Candidate, float]]):
        """Fit the model to `measured`: configurations with their measured step times in seconds."""
        precision = np.diag([1 / deviation**2 for deviation, _ in FEATURES])
        weighted = np.zeros(len(FEATURES))
        for candidate, measured_s in measured:
            row = features(candidate)
            precision += np.outer(row, row) / NOISE**2
            weighted += row * math.log(measured_s / candidate.forecast_step_s) / NOISE**2
        # The prior makes the matrix invertible, even with fewer trials than features.
        self._covariance = np.linalg.inv(precision)
        self._mean = self._covariance @ weighted

    def expected(self, candidate: Candidate) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm of the step time in seconds."""
        row = features(candidate)
        mean = math.log(candidate.forecast_step_s) + float(row @ self._mean)
        return mean, math.sqrt(float(row @ self._covariance @ row) + NOISE**2)


class ForecastErrors(NamedTuple):
    """Relative errors of forecast step times: median and largest."""

    planned: tuple[float, float]  # of the planner alone
    learned: tuple[float, float] | None  # each predicted from the other measurements; None if there are too few


def forecast_errors(measured: Sequence[tuple[Candidate, float]]) -> ForecastErrors:
    """Return the errors over all measurements; there must be at least one."""
    planned = [abs(candidate.forecast_step_s / measured_s - 1) for candidate, measured_s in measured]
    learned = []
    for left_out, (candidate, measured_s) in enumerate(measured):
        others = [pair for index, pair in enumerate(measured) if index != left_out]
        learned.append(abs(math.exp(StepTimeModel(others).expected(candidate)[0]) / measured_s - 1))
    return ForecastErrors(_median_and_max(planned), _median_and_max(learned) if len(measured) >= FEWEST else None)


def _median_and_max(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)
