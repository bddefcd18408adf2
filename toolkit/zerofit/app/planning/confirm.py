"""Planned layouts held against simulations of the engine: what a plan lets fit, `simulate` does not refuse.

A plan forecasts bytes and keeps a margin for what depends on the order of allocations; only a simulation knows that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.app.planning.answers import Confirmation, LargestFit, Plan, PlannedRun
from zerofit.simulate.endings import why_it_failed
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from zerofit.simulate.result import Simulation

MOST = 6  # layouts that are simulated for one that fits


def confirm(plan: Plan, count: int, report: Reporter) -> Plan:
    """Return the plan with its best layouts simulated, `count` of them."""
    return replace(plan, confirmed=tuple(_look(plan, n, report) for n in range(min(count, len(plan.layouts)))))


def confirm_written(plan: Plan, report: Reporter) -> Plan:
    """Return the plan with layouts simulated until one fits: the one that `Plan.write` takes, then the others."""
    known = {one.layout: one for one in plan.confirmed}
    first = plan.result.plainest or 0
    for number in [first, *(n for n in range(len(plan.layouts)) if n != first)][:MOST]:
        if number not in known:
            known[number] = _look(plan, number, report)
        if known[number].fits or known[number].problem:
            break
    return replace(plan, confirmed=tuple(sorted(known.values(), key=lambda one: one.layout)))


def settle(plan: Plan, answer: LargestFit, plan_at: Callable[[int], Plan], report: Reporter) -> Plan:
    """Return the plan for the largest value at which a simulation finds the leanest layout to fit as well.

    From the forecast's value down, each time by what the simulation misses, then between the last two.
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
    except Exception as error:  # what the plan says stands without it
        return Confirmation(layout=number, fits=False, problem=why_it_failed(error))
    beside = sum(one.high_bytes for one in found.overheads)
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
    from zerofit.app.simulation import simulate  # torch, which a stored profile needs not

    return simulate(planned.to_run(), plan.cluster, image=plan.request.image)
