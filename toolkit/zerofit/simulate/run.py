"""Simulations of whole targets: exact, or extended from few layers and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.simulate.extrapolate import TOLERANCE, extended, layer_counts, layers_of, with_layers
from zerofit.simulate.processes import simulate_all
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.errors import Problem


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """A rank and what was observed of it."""

    target: SimulationTarget
    answer: dict[str, Any]  # as `rank.simulate` gives it
    layers: tuple[int, ...] = ()  # simulated numbers of layers, the first one to check the extension; () if all were
    check_error: float = 0.0  # by how much the highest moment misses the extension's line there, relative


def simulate(
    targets: Sequence[SimulationTarget], show: Callable[[str], None], *, exact: bool = False
) -> list[SimulatedRank | Problem]:
    """Simulate each target; a Problem takes the place of one that cannot be.

    A large model is extended from few layers unless `exact`. Where its highest moment proves to be no straight line in
    the number of layers (by more than TOLERANCE), it is simulated whole after all.
    """
    counts = [None if exact else layer_counts(target) for target in targets]
    wanted = [[with_layers(t, n) for n in c] if c else [t] for t, c in zip(targets, counts, strict=True)]
    answers = iter(simulate_all([one for several in wanted for one in several], show))
    found = []
    for target, count, several in zip(targets, counts, wanted, strict=True):
        mine = [next(answers) for _ in several]
        found.append(_simulated(target, count, mine, show))
    return found


def _simulated(
    target: SimulationTarget, counts: tuple[int, ...] | None, answers: list[Any], show: Callable[[str], None]
) -> SimulatedRank | Problem:
    failed = next((answer for answer in answers if isinstance(answer, Problem)), None)
    if failed:
        return failed
    if counts is None:
        return SimulatedRank(target=target, answer=answers[0])
    answer, error = extended(answers, counts, layers_of(target))
    if abs(error) > TOLERANCE:
        return simulate([target], show, exact=True)[0]
    return SimulatedRank(target=target, answer=answer, layers=counts, check_error=error)
