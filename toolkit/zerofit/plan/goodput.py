"""Forecast what failures cost a long run: the best checkpoint interval, and the lost time.

The formulas of Young (1974) and Daly (2006) assume failures that are equally likely at any time. The spread between
months comes from a simulation with random failures (Monte Carlo).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from zerofit.features.optimizers import OPTIMIZERS, saved_bytes
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rate_catalog import SourcedRate
from zerofit.spec.cluster import Cluster
from zerofit.spec.files import field_data

if TYPE_CHECKING:
    import numpy as np

CERTAINTY = 0.99  # probability that the spare nodes suffice at any time
REPAIR_H = 24.0  # assumed: a failed node is back after a day
# 419 unplanned interruptions in 54 days on 16,384 H100
GPU_MTBF_H = SourcedRate(16_384 * 54 * 24 / 419, "The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.4")
# bytes per second of one rank, synced and hashed
WRITTEN = SourcedRate(
    0.568 * 2**30 / 2, "measured: benchmarks/results/checkpoint-bandwidth.json, two ranks on one disk"
)
# seconds from the end of a launcher until all ranks train again
RESTART_S = SourcedRate(63.3, "measured: benchmarks/results/faults.json, three hosts")
MONTH_S = 30 * 24 * 3600.0
MONTHS = 1000
MOST_FAILURES = 2_000  # simulated per month; more failures do not change the result


@dataclass(frozen=True, kw_only=True)
class Failures:
    """A cluster's time between failures, and the durations of a save, a restart and a repair."""

    mtbf_s: float  # mean time between failures of the cluster
    save_s: float  # seconds that training stops for a checkpoint
    restart_s: float  # from a failure until training continues at its checkpoint
    repair_s: float = 3600 * REPAIR_H  # until a failed node can be used again

    @property
    def interval_s(self) -> float:
        """The interval between checkpoints that loses the least time, in seconds of training."""
        return daly_interval(self.save_s, self.mtbf_s)

    @property
    def goodput(self) -> float:
        """The useful share of all time, if there are enough spare nodes."""
        return goodput(self.interval_s, self)

    @property
    def spare_nodes(self) -> int:
        """The number of spare nodes that suffices at any time with 99 % certainty."""
        return spare_nodes(self.repair_s / self.mtbf_s, CERTAINTY)


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval between checkpoints, for saves much shorter than `mtbf_s`."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval (2006, equation 37)."""
    # The series below holds for shorter saves only. For longer ones Daly uses the time between failures.
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def goodput(interval_s: float, failures: Failures) -> float:
    """Return the useful share of all time if the run saves every `interval_s` seconds.

    The formula is Daly's expected time.
    """
    mtbf_s = failures.mtbf_s
    exponent = (interval_s + failures.save_s) / mtbf_s
    # A float ends at exp(709).
    if failures.restart_s / mtbf_s + exponent > 700:  # exp() would overflow: nothing is ever saved
        return 0.0
    return interval_s / (mtbf_s * math.exp(failures.restart_s / mtbf_s) * math.expm1(exponent))


def spare_nodes(expected: float, certainty: float) -> int:
    """Return the number of spare nodes that suffices with probability `certainty` (Poisson).

    `expected`: average number of nodes in repair.
    """
    if expected > 500:  # exp(-expected) is nearly 0: use a normal distribution
        return math.ceil(expected + NormalDist().inv_cdf(certainty) * math.sqrt(expected))
    term = total = math.exp(-expected)
    count = 0
    while total < certainty:
        count += 1
        term *= expected / count
        total += term
    return count


def checkpoint_bytes(parameters: int, layout: PlannedLayout) -> tuple[float, float]:
    """Return the bytes of a checkpoint, and the most bytes that one rank writes."""
    weights, states = saved_bytes(
        OPTIMIZERS[layout.optimizer], parameters, layout.zero_stage, layout.element_bytes, layout.weight_bytes
    )
    parts = layout.tp * layout.pp
    shards = layout.zero_ranks
    # below ZeRO stage 3, the first rank of each tensor or pipeline part writes that part's weights, at stage 0 also its
    # states
    of_rank = weights / parts / (shards if layout.zero_stage == 3 else 1)
    return weights + states, of_rank + states / parts / (shards if layout.zero_stage else 1)


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The user's figures on failures and restarts. If a figure is None, a default is used."""

    mtbf_h: float | None = None
    of_node: bool = False  # whether `mtbf_h` is a node's time between failures instead of a GPU's
    storage: float | None = None  # bytes per second that all ranks together write to the checkpoint storage
    save_s: float | None = None
    restart_s: float | None = None

    def failures(self, parameters: int, layout: PlannedLayout, cluster: Cluster) -> Failures:
        """Return the failure figures of a run with this layout."""
        units = cluster.nodes if self.of_node else cluster.ranks
        every_bytes, most_bytes = checkpoint_bytes(parameters, layout)
        moved_s = max(most_bytes / WRITTEN.value, every_bytes / self.storage if self.storage else 0.0)
        return Failures(
            mtbf_s=3600 * (self.mtbf_h or GPU_MTBF_H.value) / units,
            save_s=moved_s if self.save_s is None else self.save_s,
            restart_s=RESTART_S.value + moved_s if self.restart_s is None else self.restart_s,
        )

    @property
    def sources(self) -> dict[str, str]:
        """The source of each figure that is a default."""
        sources = {
            "mtbf": "" if self.mtbf_h else f"{GPU_MTBF_H.value:,.0f} h of one GPU: {GPU_MTBF_H.how}",
            "save": "" if self.save_s is not None else f"{WRITTEN.value / 1e9:.2f} GB/s of one rank: {WRITTEN.how}",
            "restart": ""
            if self.restart_s is not None
            else f"{RESTART_S.value:g} s, then reading the checkpoint: {RESTART_S.how}",
            "repair": f"assumed: a failed node is back after {REPAIR_H:g} h",
        }
        return {name: source for name, source in sources.items() if source}


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The useful share of a run's time, and when to save."""

    mtbf_s: float
    save_s: float
    restart_s: float
    save_every_s: float  # of training, from the end of one save to the start of the next
    share: float  # expected, of all time
    low: float  # 10th and 90th percentile of simulated months
    high: float
    saving: float  # share of all time for saves
    lost: float  # share for failures: repeated work, restarts, waiting for nodes
    failures_a_day: float
    spare_nodes: int

    def to_dict(self) -> dict[str, object]:
        """Return the field `goodput` of a layout for `zerofit plan --json`."""
        return field_data(self)


# A simulation shows how much one month differs from another: train, save each interval, fail at random, lose the work
# since the last save, wait for a node, and restart. It is repeated for a thousand months at once with numpy.
def draw_months(failures: Failures, interval_s: float, spares: int, *, length_s: float = MONTH_S) -> np.ndarray:
    """Simulate months with random failures.

    Return each month's useful share, shape (MONTHS,). Failures are equally likely at any time, also during restarts.
    """
    import numpy as np  # not needed for a plan without failures

    random, segment_s = np.random.default_rng(0), interval_s + failures.save_s
    now, useful, restart_s = np.zeros(MONTHS), np.zeros(MONTHS), 0.0
    spares = min(spares, int(2 * length_s / failures.mtbf_s))  # more nodes never fail in this time
    back = np.zeros((spares + 1, MONTHS))  # when the nodes of the last failures are back
    count = 0
    while (now < length_s).any():
        lived, left = random.exponential(failures.mtbf_s, MONTHS), np.maximum(length_s - now, 0.0)
        trained = np.maximum(np.minimum(lived, left) - restart_s, 0.0)
        # work since the last save is lost
        segments = np.floor(trained / segment_s)
        # at the month's end unsaved work counts, too
        unsaved = np.where(lived > left, np.minimum(trained - segments * segment_s, interval_s), 0.0)
        useful += segments * interval_s + unsaved
        now += np.minimum(lived, left)
        # a ring of the last failures: without a spare node, training waits until the first of their nodes is back
        back[count % (spares + 1)] = now + failures.repair_s
        count += 1
        now = np.where(now < length_s, np.maximum(now, back[count % (spares + 1)]), now)
        restart_s = failures.restart_s
    return useful / length_s


@lru_cache(maxsize=1024)  # most layouts of a plan save equally much
def goodput_of(failures: Failures) -> Goodput:
    """Return the goodput of a run that saves at the best interval."""
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
