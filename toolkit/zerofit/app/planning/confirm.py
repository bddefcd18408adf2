"""Confirms planned layouts by simulating the engine, so no layout of a plan fails in `zerofit simulate`.

A plan only has a margin for fragmentation; a simulation replays every allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.app.planning.largest_fit import LargestFit
from zerofit.app.planning.plan import Confirmation, Plan, PlannedRun
from zerofit.simulate.endings import why_it_failed
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation

MOST = 6  # simulated layouts at most until one fits


def confirm(plan: Plan, count: int, report: Reporter) -> Plan:
    """Return the plan with its `count` best layouts simulated."""
    return replace(plan, confirmed=tuple(_look(plan, n, report) for n in range(min(count, len(plan.layouts)))))


def confirm_written(plan: Plan, report: Reporter) -> Plan:
    """Return the plan with layouts simulated until one fits; the layout that `Plan.write` writes is simulated first."""
    known = {confirmation.layout: confirmation for confirmation in plan.confirmed}
    first = plan.result.plainest or 0
    for number in [first, *(n for n in range(len(plan.layouts)) if n != first)][:MOST]:
        if number not in known:
            known[number] = _look(plan, number, report)
        if known[number].fits or known[number].problem:
            break
    return replace(plan, confirmed=tuple(sorted(known.values(), key=lambda confirmation: confirmation.layout)))


# A plan forecasts fragmentation with a margin; a simulation replays each allocation. Both may disagree near the limit:
#
#     value      0 ...... fitting ...... guess ...... refused
#                         simulated: fits             simulated or forecast: does not fit
#
# The guess scales with the memory that the last simulation lacked, and is the middle once a value has
# been found to fit.
def settle(plan: Plan, answer: LargestFit, plan_at: Callable[[int], Plan], report: Reporter) -> Plan:
    """Return the plan for the largest value at which the smallest layout also fits in simulation.

    Starts at the forecast's value, scales down by the memory that the simulation lacks, then bisects between the last
    two values.
    """
    value, step, looked, best = answer.value or 0, answer.step, answer.looked, None
    fitting, refused = 0, value + step
    while value and plan.layouts:
        leanest = min(range(len(plan.layouts)), key=lambda n: plan.result.layouts[n].fit.utilization)
        found = _look(plan, leanest, report)
        looked += 1
        if found.fits or found.problem:
            fitting, best = value, replace(plan, confirmed=(found,))
        else:
            refused = value
        if refused - fitting <= step:
            break
        guess = (fitting + refused) // 2 if best else value * found.available_bytes // max(1, found.needed_bytes)
        value = max(fitting + step, min(guess // step * step, refused - step))
        plan = plan_at(value)
    return replace(best or plan, answer=replace(answer, value=fitting or None, looked=looked))


def _look(plan: Plan, number: int, report: Reporter) -> Confirmation:
    """Simulate one layout of a plan."""
    planned = plan.layouts[number]
    report.status(f"simulating layout {number + 1} ...")
    try:
        found = _simulate(planned, plan)
    except Exception as error:  # the plan is valid without it
        return Confirmation(layout=number, fits=False, problem=why_it_failed(error))
    beside = sum(overhead.high_bytes for overhead in found.overheads)
    return Confirmation(
        layout=number,
        fits=found.fits,
        verdict=found.verdict,
        peak_bytes=found.peak_bytes,
        reserved_bytes=found.reserved_bytes,
        needed_bytes=found.reserved_ahead_bytes + beside,
        available_bytes=found.device_total_bytes,
        because=found.because,
    )


def _simulate(planned: PlannedRun, plan: Plan) -> Simulation:
    from zerofit.app.simulation.runs import simulate  # imports torch, which a stored profile does not need

    return simulate(planned.to_run(), plan.cluster, image=plan.request.image)
