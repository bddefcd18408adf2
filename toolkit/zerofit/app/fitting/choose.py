"""Choose a layout: formulas forecast all options, simulations decide which of them fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from zerofit.app.fitting.options import LayoutOption
from zerofit.plan.fit import check_fit
from zerofit.plan.result import plain
from zerofit.simulate.forecast.result import Simulation, severity
from zerofit.simulate.forecast.verdict import FITS, WITHIN
from zerofit.spec.cluster import Cluster
from zerofit.spec.overhead import REPLAYED

MOST = 6  # options to simulate
# The simplest option this close to the fastest is chosen, since forecasts of time are not more precise. In
# benchmarks/fit.py the choice reaches 97 % of the best throughput that fits with 0, and 98 % with 0.1.
ALIKE = 0.1

Simulate = Callable[[LayoutOption], Sequence[Simulation]]  # raises Refused


class Refused(Exception):
    """Raised for an option that zerofit or DeepSpeed does not support for this run."""


def needed_bytes(simulation: Simulation) -> float:
    """Return the device memory that a rank needs to fit with certainty, in bytes."""
    return _torch_bytes(simulation) + sum(overhead.high_bytes for overhead in simulation.overheads)


def _torch_bytes(simulation: Simulation) -> float:
    """Return the bytes that torch reserves, with the margin of a replay."""
    return (1 + REPLAYED) * simulation.reserved_ahead_bytes


# Plan's forecasts are fast and close; a simulation of the engine is exact and takes seconds. So plan orders the options
# and the engine decides:
#
#     1. Take the simplest option within 10 % of the fastest that should fit, and simulate it.
#     2. The ratio of simulated to forecast memory corrects the forecasts of the other options.
#     3. If another option is better now, simulate it. Stop after six simulations, or when the best option is simulated.
@dataclass
class FitSearch:
    """A search for the fastest options that fit the free memory of each node."""

    options: Sequence[LayoutOption]
    free: Cluster
    simulate: Simulate
    most_bytes: float = math.inf  # limit of reserved bytes per rank; a layout that reserved more ran out of memory
    seen: dict[LayoutOption, Simulation | None] = field(default_factory=dict)  # None: cannot be simulated
    _refused: set[tuple] = field(default_factory=set)
    _last: tuple[LayoutOption, Simulation] | None = None  # the last simulated option, which corrects plan's forecasts

    def run(self) -> LayoutOption | None:
        """Return the chosen option; None if no option fits or is close to the limit.

        An option that is close to the limit is chosen only if no option fits.
        """
        # Each simulation corrects the forecasts, so another option may be preferred after it.
        while (option := self._preferred(self.options)) not in self.seen:
            if option is None or len(self.seen) == MOST:
                break
            self._look(option)
        option = self._preferred(list(self.seen))
        # Corrected forecasts have errors, too. So the leanest option is simulated even if it should not fit.
        if option is None and (leanest := self.leanest) and leanest not in self.seen:
            self._look(leanest)
        return option or self._preferred(list(self.seen)) or self._preferred(list(self.seen), {FITS, WITHIN})

    @property
    def leanest(self) -> LayoutOption | None:
        """The option that leaves its fullest memory (device, host or disk) most free, by forecast."""
        remaining = [option for option in self.options if _kind(option) not in self._refused]
        return min(
            remaining, key=lambda option: check_fit(option.memory, option.layout, self.free).utilization, default=None
        )

    def faster_than(self, option: LayoutOption) -> list[LayoutOption]:
        """Return the options that are faster than `option` but do not fit, fastest first."""
        remaining = [faster for faster in self.options if faster.samples_per_s > option.samples_per_s]
        return [faster for faster in remaining if not self._fits(faster)]

    def _preferred(
        self, options: Sequence[LayoutOption], verdicts: Set[str] = frozenset({FITS})
    ) -> LayoutOption | None:
        """Return the simplest of the fitting options that are nearly as fast as the fastest."""
        fitting = [option for option in options if self._fits(option, verdicts)]
        least = (1 - ALIKE) * max((option.samples_per_s for option in fitting), default=0.0)
        near = [option for option in fitting if option.samples_per_s >= least]

        def complexity(option: LayoutOption) -> tuple[float, ...]:
            # Simple means: no offload first, then small degrees besides data parallelism, then no recomputation, then a
            # low stage. Among equally simple options the fastest counts.
            offloads, degrees, checkpointing, stage, overlap, *_ = plain(option.layout)
            savings = len(option.savings.fields)
            return (offloads, degrees, checkpointing, stage, savings, overlap, -option.samples_per_s)

        return min(near, key=complexity, default=None)

    def _fits(self, option: LayoutOption, verdicts: Set[str] = frozenset({FITS})) -> bool:
        """Return whether the option fits, by simulation or by plan's corrected forecast."""
        worst = self.seen.get(option)
        if worst:
            return worst.verdict in verdicts and worst.reserved_bytes <= self.most_bytes
        if option not in self.seen and _kind(option) in self._refused:
            return False
        peak_bytes, fit = option.memory.peak_bytes, check_fit(option.memory, option.layout, self.free)
        if self._last is None:
            return fit.exceeded is None and peak_bytes <= self.most_bytes
        # The last simulation corrects plan's forecast: its ratio to plan's scales torch's memory and host memory. The
        # memory outside torch does not depend on the option, so the simulated bytes are added.
        simulated_option, simulation = self._last
        planned = check_fit(simulated_option.memory, simulated_option.layout, self.free)
        ratio = _torch_bytes(simulation) / simulated_option.memory.peak_bytes
        host_ratio = simulation.host_node_bytes / planned.host_bytes if planned.host_bytes else 1.0
        device_bytes = ratio * peak_bytes + needed_bytes(simulation) - _torch_bytes(simulation)
        corrected = replace(fit, device_bytes=device_bytes, host_bytes=host_ratio * fit.host_bytes)
        return corrected.exceeded is None and ratio * peak_bytes <= self.most_bytes

    def _look(self, option: LayoutOption) -> None:
        try:
            simulations = self.simulate(option)
        except Refused:
            self._refused.add(_kind(option))
            return
        worst = self.seen[option] = max(simulations, key=severity) if simulations else None
        if worst:
            self._last = (option, worst)


def _kind(option: LayoutOption) -> tuple:
    """Return what decides whether an option is refused."""
    # DeepSpeed and zerofit refuse combinations of features, never sizes. So options that differ only in batch sizes,
    # buckets or overlap are all refused or all accepted.
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
