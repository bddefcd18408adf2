"""Simulate planned layouts, so that no layout of a plan fails in `zerofit simulate`.

A plan has only a margin for fragmentation; a simulation replays every allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.app.planning.largest_fit import LargestFit
from zerofit.app.planning.plan import Confirmation, Plan, PlannedRun
from zerofit.plan.fit import CLOSE
from zerofit.plan.result import RankedLayout
from zerofit.simulate.endings import why_it_failed
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation

MOST = 6  # maximum number of simulated layouts until one fits


def confirm(plan: Plan, count: int, report: Reporter) -> Plan:
    """Simulate the `count` best layouts of a plan, and up to `count` layouts close to the limit.

    Return the plan with the results. If a layout close to the limit fits in simulation, it joins the plan's
    layouts.
    """
    close, result = plan.result.close, plan.result
    looks = [(row, _confirm_layout(plan, row, f"a layout {CLOSE}", report)) for row in close[:count]]
    # The indices of layouts change when others join, so confirmations are kept by the identity of the row.
    confirmations = {id(row): confirmation for row, confirmation in looks if confirmation.fits}
    promoted = [row for row, _ in looks if id(row) in confirmations]
    layouts = sorted((*promoted, *result.layouts), key=lambda row: -row.samples_per_s)
    still_close = (*(row for row, confirmation in looks if confirmation.problem), *close[count:])
    fitting = result.fitting + len(promoted)
    plan = replace(plan, result=replace(result, layouts=tuple(layouts), close=still_close, fitting=fitting))
    for number, row in enumerate(layouts[:count]):
        if id(row) not in confirmations:
            confirmations[id(row)] = _confirm_layout(plan, row, f"layout {number + 1}", report)
    numbered = ((n, confirmations[id(row)]) for n, row in enumerate(layouts) if id(row) in confirmations)
    return replace(plan, confirmed=tuple(replace(confirmation, layout=n) for n, confirmation in numbered))


def confirm_written(plan: Plan, report: Reporter) -> Plan:
    """Simulate layouts until one fits, starting with the one that `Plan.write` would write.

    Return the plan with the results.
    """
    known = {confirmation.layout: confirmation for confirmation in plan.confirmed}
    first = plan.result.plainest or 0
    # the chosen layout first, then the others from fast to slow
    for number in [first, *(n for n in range(len(plan.layouts)) if n != first)][:MOST]:
        if number not in known:
            row = plan.result.layouts[number]
            known[number] = replace(_confirm_layout(plan, row, f"layout {number + 1}", report), layout=number)
        if known[number].fits or known[number].problem:
            break
    return replace(plan, confirmed=tuple(sorted(known.values(), key=lambda confirmation: confirmation.layout)))


# A plan forecasts fragmentation with a margin; a simulation replays each allocation. Both may disagree near the limit:
#
#     value      0 ...... fitting ...... guess ...... refused
#                         simulated: fits             simulated or forecast: does not fit
#
# Until a value fits, the guess is the refused value times available / needed memory. Then the guess is the middle.
def settle(plan: Plan, answer: LargestFit, plan_at: Callable[[int], Plan], report: Reporter) -> Plan:
    """Return the plan for the largest value (see `LargestFit`) that fits in simulation.

    Only the layout with the least memory is simulated for each value, beginning with the forecast's value.
    """
    value, step, looked, best = answer.value or 0, answer.step, answer.looked, None
    fitting, refused = 0, value + step
    while value and plan.layouts:
        leanest = min(range(len(plan.layouts)), key=lambda n: plan.result.layouts[n].fit.utilization)
        row = plan.result.layouts[leanest]
        look = replace(_confirm_layout(plan, row, f"layout {leanest + 1}", report), layout=leanest)
        looked += 1
        if look.fits or look.problem:  # a layout that cannot be simulated counts as forecast: it fits
            fitting, best = value, replace(plan, confirmed=(look,))
        else:
            refused = value
        if refused - fitting <= step:
            break
        guess = (fitting + refused) // 2 if best else value * look.available_bytes // max(1, look.needed_bytes)
        value = max(fitting + step, min(guess // step * step, refused - step))
        plan = plan_at(value)
    return replace(best or plan, answer=replace(answer, value=fitting or None, looked=looked))


def _confirm_layout(plan: Plan, row: RankedLayout, name: str, report: Reporter) -> Confirmation:
    """Simulate one layout of a plan. The caller sets the index of the confirmation."""
    planned = PlannedRun(ranked=row, profile=plan.profile, request=plan.request)
    report.status(f"simulating {name} ...")
    try:
        simulation = _simulate(planned, plan)
    except Exception as error:  # the plan is valid without the simulation
        return Confirmation(layout=0, fits=False, problem=why_it_failed(error))
    outside_torch = sum(overhead.high_bytes for overhead in simulation.overheads)
    return Confirmation(
        layout=0,
        fits=simulation.fits,
        verdict=simulation.verdict,
        peak_bytes=simulation.peak_bytes,
        reserved_bytes=simulation.reserved_bytes,
        needed_bytes=simulation.reserved_ahead_bytes + outside_torch,
        available_bytes=simulation.device_total_bytes,
        because=simulation.because,
    )


def _simulate(planned: PlannedRun, plan: Plan) -> Simulation:
    from zerofit.app.simulation.runs import simulate  # imports torch, which a stored profile does not need

    return simulate(planned.to_run(), plan.cluster, image=plan.request.image)
