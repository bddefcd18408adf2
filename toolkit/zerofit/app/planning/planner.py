"""`zerofit.plan`: find the layouts of a model that fit a cluster, and their speed.

A plan has only a margin for fragmentation. Simulations replay every allocation of its best layouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from zerofit.app.planning.corrections import MeasuredSpeed, refuse_other_device
from zerofit.app.planning.largest_fit import FewestDevices, LargestFit, fewest, maximum_of, remedies_of, with_value
from zerofit.app.planning.layout_pins import LayoutPins
from zerofit.app.planning.outlook_options import WorkOptions, read_work
from zerofit.app.planning.plan import Confirmation, Plan, PlannedRun
from zerofit.app.planning.request import Maximum, Minimum, PlanningRequest
from zerofit.app.planning.search_setup import SearchSetup, forecast_of, setup_of
from zerofit.features.engines import Engine
from zerofit.plan.fit import CLOSE
from zerofit.plan.inverse import MOST_GPUS
from zerofit.plan.result import RankedLayout, with_outlooks
from zerofit.plan.search import search
from zerofit.simulate.endings import why_it_failed
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problems
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation


MOST = 6  # maximum number of simulated layouts until one fits


# How a plan comes about, for each cluster:
#
#   request ─► profile of the model, fixed values, corrections    `search_setup.setup_of`
#           ─► with --max or --min: the largest value that fits,  `largest_fit`
#              or the fewest devices
#           ─► layouts that fit, fastest first                    `plan.search.search`
#           ─► simulations of the best layouts                    `confirm`
#           ─► files and a trace of the chosen layout             `Plan.write`, `Plan.trace`
class PlanOptions(LayoutPins, WorkOptions):
    """Options of `plan` besides its named arguments."""


def plan(
    model: str | Run | None = None,
    cluster: Cluster | Sequence[Cluster] | None = None,
    *,
    profile: Path | str | None = None,
    image: str | None = None,
    maximum: Maximum | None = None,
    minimum: Minimum | None = None,
    tuned: Path | str | None = None,
    measured: str | None = None,
    from_trace: Path | str | None = None,
    top: int = 10,
    nvme_path: str = "/local_nvme",
    confirm: int = 0,
    trust_model_code: bool = False,
    engines: Sequence[Engine] = ("deepspeed",),
    on_event: OnEvent | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the layouts of a model that fit a cluster, fastest first, and why others do not.

    Args:
        model: a model's name, or a run. Fields of the run that are also `options` are kept fixed.
        cluster: the hardware; this machine if None. For several clusters, the plan of the fastest is returned, and its
            `boxes` are the plans of all of them.
        profile: a stored profile (`Plan.profile_file`) instead of a model; torch is not imported then.
        image: "image:3x224x224", input of an image model.
        maximum: "seq-len", "micro-batch" or "layers": plan for the largest value that fits (`Plan.answer`).
        minimum: "gpus": plan for the fewest devices that suffice (`Plan.answer`).
        tuned: folder of `zerofit tune`; its trials correct step times.
        measured: "5.33samples/s", "21000tokens/s" or "0.52s" (per step): the measured speed of the layout that
            `options` describe. It corrects the step times of all layouts. The search covers all layouts with the
            precision and the global batch of the measured layout.
        from_trace: a trace of `zerofit train --profile`, whose kernel times replace the catalog's.
        top: number of layouts to return.
        nvme_path: folder for layouts that offload to disk.
        confirm: simulate this many of the best layouts (`Plan.confirmed`). `Plan.write` skips layouts that do not fit.
        trust_model_code: allow the import of a model package.module:callable that `profile` or the run folder of
            `from_trace` names.
        engines: the engines whose layouts are searched: "deepspeed", "fsdp2".
        on_event: gets progress.
        **options: facts and fixed values. Facts are for the `outlook` of each layout: the length of the training
            (`epochs`, `tokens` such as "15T", `samples`), the price of a GPU hour (`price`), the time between failures
            (`mtbf`, such as "6000/node"), and the time of a save (`storage` or `timed_by`).
            Fixed values (`LayoutPins`) apply to all layouts or, if `measured` is given, only to the measured layout.
            Their names are those of flags of `zerofit plan`, like `global_batch` or `zero_stage`. `ds_config` is a
            DeepSpeed JSON; all its values are fixed, except "auto".

    Raises UserError with all problems.

    >>> import zerofit as zf
    >>> plan = zf.plan("llama-tiny", zf.Cluster("l4", gpus=2), global_batch=8, seq_len=64, tensor_parallel=1)
    >>> best = plan.layouts[0]
    >>> best.layout.world_size, best.layout.global_batch, best.peak_bytes < plan.cluster.device.memory_bytes
    (2, 8, True)
    >>> best.to_run().ranks
    2
    """
    wanted = {name: options.get(name) for name in WorkOptions.__annotations__}
    pins: Any = {name: value for name, value in options.items() if name not in wanted}
    request = PlanningRequest(
        model=model,
        pins=pins,
        work=read_work(wanted),
        profile=Path(profile) if profile else None,
        image=image,
        maximum=maximum,
        minimum=minimum,
        tuned=Path(tuned) if tuned else None,
        measured=MeasuredSpeed.parse(measured) if measured else None,
        from_trace=Path(from_trace) if from_trace else None,
        top=top,
        nvme_path=nvme_path,
        confirm=confirm,
        trust_model_code=trust_model_code,
        engines=tuple(engines),
    )
    clusters = [cluster] if isinstance(cluster, Cluster) else list(cluster or (Cluster.here(),))
    return answer_request(request, clusters, on_event=on_event)


def answer_request(
    request: PlanningRequest,
    clusters: Sequence[Cluster],
    *,
    on_event: OnEvent | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Plan:
    """Return the plan for the best cluster; for several, its `boxes` are the plans for all.

    `on_plan` gets the plan before layouts are simulated, which takes longer.
    """
    start, problems, report = time.perf_counter(), Problems(), Reporter(on_event)
    report.note(*request.notes)
    if corrections := request.corrections:
        for cluster in clusters:
            problems.attempt(partial(refuse_other_device, corrections, cluster.device.kind))
    if request.measured and len(clusters) > 1:
        problems.add(
            "usage", "--measured supports only one kind of machine", "name one kind with --gpu", "--measured, --gpu"
        )
    problems.raise_if_any()
    plans = [plan_for(cluster, request, report) for cluster in clusters]
    plans.sort(key=lambda plan: -plan.result.layouts[0].samples_per_s if plan.result.layouts else 0.0)
    boxes = tuple(plans) if len(plans) > 1 else ()
    best = replace(plans[0], boxes=boxes)
    # Simulations may add layouts near the limit to the table, so the plan is shown only after them.
    changes = request.confirm > 0 and bool(best.result.close)
    if on_plan and not changes:
        on_plan(best)
    confirmed = confirm(best, request.confirm, report) if request.confirm else best
    if request.write and request.profile is None and confirmed.layouts:
        confirmed = confirm_written(confirmed, report)
    confirmed = replace(confirmed, total_s=round(time.perf_counter() - start, 3))
    if on_plan and changes:
        on_plan(confirmed)
    return confirmed


def plan_for(cluster: Cluster, request: PlanningRequest, report: Reporter) -> Plan:
    """Return the plan for one cluster."""
    setup, file = setup_of(cluster, request, report)
    if request.maximum:
        # The plan is for the largest value that fits by forecast. Simulations confirm it, or find a smaller one.
        setup, largest_fit = maximum_of(setup, cluster, request.maximum, report)
        plan = _plan_of(setup, cluster, request, file, largest_fit)
        if request.profile is not None:  # without importing torch
            return plan

        def plan_at(value: int) -> Plan:
            smaller = with_value(setup, largest_fit.what, value, report)
            return _plan_of(smaller, cluster, request, file, largest_fit)

        return settle(plan, largest_fit, plan_at, report)
    answer = None
    if request.minimum:
        smallest = fewest(setup, cluster)
        cluster = smallest or cluster
        answer = FewestDevices(cluster=smallest, looked_up_to=MOST_GPUS)
    return _plan_of(setup, cluster, request, file, answer)


def _plan_of(
    setup: SearchSetup,
    cluster: Cluster,
    request: PlanningRequest,
    file: Path | None,
    answer: LargestFit | FewestDevices | None,
) -> Plan:
    profile = setup.profile
    forecast = forecast_of(profile, cluster)
    result = search(profile, cluster, setup.request, forecast, setup.calibration, setup.top, setup.correct)
    if setup.scaling and not cluster.on_cpu:
        result = setup.scaling.with_narrower_errors(result)
    return Plan(
        result=with_outlooks(result, request.work, profile) if request.work else result,
        request=request,
        profile=profile,
        profile_file=file if request.maximum != "seq-len" else None,  # the stored profile has another sequence length
        answer=answer,
        remedies=() if result.layouts else tuple(remedies_of(setup, cluster)),
        tuned=request.corrections,
        scaling=setup.scaling,
        by_trace=setup.by_trace,
    )


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
    planned = PlannedRun.of(row, plan.profile, plan.request)
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
