"""Simulations of whole targets: exact, or extrapolated from few layers and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerofit.simulate.extrapolate import TOLERANCE, extrapolate_layers, layer_counts, layers_of, with_layers
from zerofit.simulate.processes import simulate_all
from zerofit.simulate.record import RankRecord
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.errors import Problem


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """A rank and what was observed of it."""

    target: SimulationTarget
    record: RankRecord
    layers: tuple[int, ...] = ()  # the simulated numbers of layers, the first one for the check; () if all were
    check_error: float = 0.0  # by how much the peak misses the extrapolation's line at the first of them, relative


def simulate(
    targets: Sequence[SimulationTarget], show: Callable[[str], None], *, exact: bool = False
) -> list[SimulatedRank | Problem]:
    """Simulate each target; a Problem takes the place of one that cannot be simulated.

    A large model is extrapolated from few layers unless `exact`. Where its peak proves not to be linear in the number
    of layers (by more than TOLERANCE), all layers are simulated after all.
    """
    counts = [None if exact else layer_counts(target) for target in targets]
    wanted = [[with_layers(t, n) for n in c] if c else [t] for t, c in zip(targets, counts, strict=True)]
    outcomes = iter(simulate_all([one for several in wanted for one in several], show))
    return [
        _simulated(target, count, [next(outcomes) for _ in several], show)
        for target, count, several in zip(targets, counts, wanted, strict=True)
    ]


def _simulated(
    target: SimulationTarget,
    counts: tuple[int, ...] | None,
    outcomes: Sequence[RankRecord | Problem],
    show: Callable[[str], None],
) -> SimulatedRank | Problem:
    records = []
    for outcome in outcomes:
        if isinstance(outcome, Problem):
            return outcome
        records.append(outcome)
    if counts is None:
        return SimulatedRank(target=target, record=records[0])
    record, error = extrapolate_layers(records, counts, layers_of(target))
    if abs(error) > TOLERANCE:
        return simulate([target], show, exact=True)[0]
    return SimulatedRank(target=target, record=record, layers=counts, check_error=error)
