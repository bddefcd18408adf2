"""The option that a run takes: plan's forecasts say which to look at, simulations of the engine decide what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from zerofit.app.fitting.options import LayoutOption
from zerofit.plan.fit import check_fit
from zerofit.plan.result import plain
from zerofit.simulate.result import Simulation, severity
from zerofit.simulate.verdict import FITS, WITHIN
from zerofit.spec.cluster import Cluster
from zerofit.spec.overhead import REPLAYED

MOST = 6  # options that are simulated
# Of options this near to the fastest the plainest is taken: a forecast of time knows them apart no better
# (benchmarks/fit.py: with 0 the choice reaches 97 % of the best throughput that fits, with this 98 %)
ALIKE = 0.1

Simulate = Callable[[LayoutOption], Sequence[Simulation]]  # raises Refused


class Refused(Exception):
    """Raised for an option that zerofit or DeepSpeed does not take for this run."""


def needed_bytes(simulation: Simulation) -> float:
    """Return what a device must have for the verdict that a rank fits."""
    return _kept_bytes(simulation) + sum(one.high_bytes for one in simulation.overheads)


def _kept_bytes(simulation: Simulation) -> float:
    return (1 + REPLAYED) * simulation.reserved_ahead_bytes


@dataclass
class FitSearch:
    """A search among options, the fastest first, for the memory that is free on each node."""

    options: Sequence[LayoutOption]
    free: Cluster
    simulate: Simulate
    most_bytes: float = math.inf  # reserved by a rank; one with more has run out of memory
    seen: dict[LayoutOption, Simulation | None] = field(default_factory=dict)  # None: it cannot be simulated
    _refused: set[tuple] = field(default_factory=set)
    _last: tuple[LayoutOption, Simulation] | None = None  # what was simulated last: it corrects plan's forecasts

    def run(self) -> LayoutOption | None:
        """Return the option to take; one that is within the margin where none is sure to fit; None where none fits."""
        while (option := self._preferred(self.options)) not in self.seen:
            if option is None or len(self.seen) == MOST:
                break
            self._look(option)
        option = self._preferred(list(self.seen))
        if option is None and (leanest := self.leanest) and leanest not in self.seen:
            self._look(leanest)
        return option or self._preferred(list(self.seen)) or self._preferred(list(self.seen), {FITS, WITHIN})

    @property
    def leanest(self) -> LayoutOption | None:
        """The option that needs least of the scarcest memory, by plan's forecast."""
        there = [one for one in self.options if _kind(one) not in self._refused]
        return min(there, key=lambda one: check_fit(one.memory, one.layout, self.free).utilization, default=None)

    def faster_than(self, option: LayoutOption) -> list[LayoutOption]:
        """Return the options that would be faster and do not fit, the fastest first."""
        there = [one for one in self.options if one.samples_per_s > option.samples_per_s]
        return [one for one in there if not self._fits(one)]

    def _preferred(
        self, options: Sequence[LayoutOption], verdicts: Set[str] = frozenset({FITS})
    ) -> LayoutOption | None:
        """Return the plainest of those that are nearly as fast as the fastest that fits, for all that is known now."""
        fitting = [one for one in options if self._fits(one, verdicts)]
        least = (1 - ALIKE) * max((one.samples_per_s for one in fitting), default=0.0)
        near = [one for one in fitting if one.samples_per_s >= least]
        return min(near, key=lambda one: (*_machinery(one), -one.samples_per_s), default=None)

    def _fits(self, option: LayoutOption, verdicts: Set[str] = frozenset({FITS})) -> bool:
        """Return whether simulate says so; for what has not been simulated, plan's forecast as the last one was off."""
        worst = self.seen.get(option)
        if worst:
            return worst.verdict in verdicts and worst.reserved_bytes <= self.most_bytes
        if option not in self.seen and _kind(option) in self._refused:
            return False
        peak_bytes, fit = option.memory.peak_bytes, check_fit(option.memory, option.layout, self.free)
        if self._last is None:
            return fit.exceeded is None and peak_bytes <= self.most_bytes
        before, found = self._last
        planned = check_fit(before.memory, before.layout, self.free)
        ratio = _kept_bytes(found) / before.memory.peak_bytes
        host = found.host_node_bytes / planned.host_bytes if planned.host_bytes else 1.0
        device_bytes = ratio * peak_bytes + needed_bytes(found) - _kept_bytes(found)
        corrected = replace(fit, device_bytes=device_bytes, host_bytes=host * fit.host_bytes)
        return corrected.exceeded is None and ratio * peak_bytes <= self.most_bytes

    def _look(self, option: LayoutOption) -> None:
        try:
            found = self.simulate(option)
        except Refused:
            self._refused.add(_kind(option))
            return
        worst = self.seen[option] = max(found, key=severity) if found else None
        if worst:
            self._last = (option, worst)


def _machinery(option: LayoutOption) -> tuple[int, ...]:
    """Return what sorts plain options first: plan's order, without sizes and with the chunks of the loss."""
    offloads, degrees, checkpointing, stage, overlap, *_ = plain(option.layout)
    return (offloads, degrees, checkpointing, stage, len(option.savings.fields), overlap)


def _kind(option: LayoutOption) -> tuple:
    """Return what a refusal depends on."""
    layout = option.layout
    return (
        layout.zero_stage,
        layout.offload,
        layout.tp,
        layout.pp,
        layout.sp,
        layout.ep,
        layout.checkpointing,
        option.savings,
    )
