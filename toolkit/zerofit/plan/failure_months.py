"""Simulate months of a training with random failures (Monte Carlo)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.plan.goodput import Failures, Goodput

if TYPE_CHECKING:
    import numpy as np

MONTH_S = 30 * 24 * 3600.0
MONTHS = 1000
MOST_FAILURES = 2_000  # simulated per month; more do not change the result


def draw_months(
    failures: Failures, interval_s: float, spares: int, *, months: int = MONTHS, length_s: float = MONTH_S
) -> np.ndarray:
    """Return the useful share of each month's time, shape (months,).

    Failures are equally likely at any time, also during restarts. Each takes a node out for `repair_s`; if no spare
    node is left, training waits until the first is back. Work that was not saved is repeated.
    """
    import numpy as np  # not needed for a plan without failures

    random, segment_s = np.random.default_rng(0), interval_s + failures.save_s
    now, useful, restart_s = np.zeros(months), np.zeros(months), 0.0
    spares = min(spares, int(2 * length_s / failures.mtbf_s))  # more nodes never fail in this time
    back = np.zeros((spares + 1, months))  # when the nodes of the last failures are back
    count = 0
    while (now < length_s).any():
        lived, left = random.exponential(failures.mtbf_s, months), np.maximum(length_s - now, 0.0)
        trained = np.maximum(np.minimum(lived, left) - restart_s, 0.0)
        segments = np.floor(trained / segment_s)
        # at the month's end unsaved work counts, too
        unsaved = np.where(lived > left, np.minimum(trained - segments * segment_s, interval_s), 0.0)
        useful += segments * interval_s + unsaved
        now += np.minimum(lived, left)
        back[count % (spares + 1)] = now + failures.repair_s
        count += 1
        now = np.where(now < length_s, np.maximum(now, back[count % (spares + 1)]), now)
        restart_s = failures.restart_s
    return useful / length_s


@lru_cache(maxsize=1024)  # most layouts of a plan save equally much
def goodput_of(failures: Failures) -> Goodput:
    """Return the goodput of a training that is saved at the best interval."""
    import numpy as np

    interval_s, share = failures.interval_s, failures.goodput
    length_s = min(MONTH_S, MOST_FAILURES * failures.mtbf_s)
    months = draw_months(failures, interval_s, failures.spare_nodes, length_s=length_s)
    low, high = np.quantile(months, (0.1, 0.9))
    saving = share * failures.save_s / interval_s
    return Goodput(
        mtbf_s=failures.mtbf_s,
        save_s=failures.save_s,
        restart_s=failures.restart_s,
        save_every_s=interval_s,
        share=share,
        low=float(low),
        high=float(high),
        saving=saving,
        lost=1 - share - saving,
        failures_a_day=24 * 3600 / failures.mtbf_s,
        spare_nodes=failures.spare_nodes,
    )
