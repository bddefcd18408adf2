"""The search: every layout forecast, those that do not fit counted with their reasons, the rest by their speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from zerofit.plan.degrees import Degrees, degree_problem
from zerofit.plan.fit import Fit, fit
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.rates import Rates, rates_of
from zerofit.plan.reasons import Forecast, remedy, why
from zerofit.plan.result import PlanResult, RankedLayout, Rejected, plain
from zerofit.plan.space import PlanRequest, SearchSpace, space_of
from zerofit.plan.time import StepTime, Timer, model_flops
from zerofit.spec.calibration import Calibration
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problems, UserError
from zerofit.spec.overhead import HOST_RESERVE
from zerofit.spec.precision import ELEMENT_BYTES
from zerofit.spec.profile import Profile, setting

Correct = Callable[[PlannedLayout, float], float]


class TimedLayout(NamedTuple):
    """A layout that fits, and its speed."""

    layout: PlannedLayout
    time: StepTime
    samples_per_s: float


def search(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    forecast: Forecast,
    calibration: Calibration | None = None,
    top: int = 10,
    correct: Correct | None = None,
) -> PlanResult:
    """Rank all layouts. Raises UserError where degrees or batches that were asked for cannot be.

    `correct`: the step time of a layout whose forecast is given, both in seconds.
    """
    start = time.perf_counter()
    refuse(profile, cluster, request)
    space = space_of(profile, cluster, request)
    if not space.families:
        raise UserError(*(problem for problem, _ in space.left_out.values()))
    rates = rates_of(cluster, request.precision, calibration)
    fitting, misses = _judged(space.families, cluster, forecast)
    timer = Timer(profile, cluster, rates)
    rated = sorted((_rated(layout, timer, correct) for layout in fitting), key=_rank)
    flops = (
        model_flops(profile, request.precision) if setting(request.precision, False, 1, 1) in profile.costs else None
    )
    ranked = (_ranked(one, profile, cluster, forecast, rates, flops) for one in _shown(rated, top, request.every))
    return PlanResult(
        model=profile.model,
        parameters=profile.parameters,
        seq_len=profile.seq_len,
        precision=request.precision,
        cluster=cluster,
        rates=rates,
        layouts=tuple(ranked),
        rejections=tuple(_rejected(misses, space, cluster, forecast)),
        considered=sum(map(len, space.families)),
        fitting=len(fitting),
        seconds=time.perf_counter() - start,
    )


def pressure(profile: Profile, cluster: Cluster, request: PlanRequest, forecast: Forecast) -> float:
    """What the layout that fits best wants of the scarcest memory, as a share of what there is; above 1 none fits."""
    families = space_of(profile, cluster, request).families
    return min((_over(family[0], profile, cluster, forecast) for family in families), default=math.inf)


def _over(layout: PlannedLayout, profile: Profile, cluster: Cluster, forecast: Forecast) -> float:
    """What a layout wants as a share of what there is; at least that, where a pipeline is far too large.

    Cutting hundreds of layers into stages takes seconds: it is left out where a stage's average share of parameters
    and moments, which stand on the device at stages 0 and 1, is too large already.
    """
    if layout.pp > 1:
        share = profile.parameters / layout.pp
        least = ELEMENT_BYTES[layout.precision] * share + 8 * share / (layout.dp if layout.zero_stage else 1)
        if least > cluster.device.memory_bytes:
            return least / cluster.device.memory_bytes
    return _fit_of(layout, cluster, forecast)[1].over


def host_needed(profile: Profile, cluster: Cluster, request: PlanRequest, forecast: Forecast) -> float | None:
    """Bytes of a node's memory with which a layout would fit; None where that alone does not help."""
    ample = replace(cluster, host_memory=10**18)
    fits = [_fit_of(family[0], ample, forecast)[1] for family in space_of(profile, cluster, request).families]
    return min((one.host_bytes / (1 - HOST_RESERVE) for one in fits if one.short is None), default=None)


def refuse(profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
    """Raise a UserError with everything that makes the asked degrees and batch impossible."""
    problems = Problems()
    if request.tp or request.pp or request.sp:
        problem = degree_problem(Degrees(request.tp or 1, request.pp or 1, request.sp or 1), profile, cluster)
        if problem:
            problems.extend([problem])
    if request.global_batch and request.micro_batch and request.global_batch % request.micro_batch:
        problems.add(
            "batch-size",
            f"--micro-batch {request.micro_batch} does not divide --global-batch {request.global_batch}",
            "leave --micro-batch out, or take one that does",
            "--micro-batch",
        )
    problems.raise_if_any()


def _fit_of(layout: PlannedLayout, cluster: Cluster, forecast: Forecast) -> tuple[LayoutMemory, Fit]:
    """The forecast counts one micro batch before the last, and those in flight; more of them change nothing."""
    most = max(2, layout.pp)
    memory = forecast(layout if layout.accumulation <= most else replace(layout, accumulation=most))
    return memory, fit(memory, layout, cluster)


def _judged(
    families: list[list[PlannedLayout]], cluster: Cluster, forecast: Forecast
) -> tuple[list[PlannedLayout], dict[str, tuple[int, PlannedLayout, LayoutMemory, Fit]]]:
    """Those that fit, and for each reason how many do not and the one that came nearest.

    Where the first of a family does not fit, the others, which need more, do not either. Where it fits with all that
    larger buckets can add to spare, the others fit too.
    """
    fitting, misses = [], {}
    for family in families:
        memory, judged = _fit_of(family[0], cluster, forecast)
        short = judged.short
        if short:
            _note(misses, short, len(family), family[0], memory, judged)
            continue
        fitting.append(family[0])
        spare = judged.device_there_bytes - judged.device_bytes
        for variant in family[1:]:
            if variant.persistence != family[0].persistence or _most_added(variant) > spare:
                memory, judged = _fit_of(variant, cluster, forecast)
                if judged.short:
                    _note(misses, judged.short, 1, variant, memory, judged)
                    continue
            fitting.append(variant)
    return fitting, misses


def _most_added(variant: PlannedLayout) -> float:
    """Bytes that buckets can add at most: in float32, flattened, sent and received, twice with overlap."""
    return 4 * 4 * variant.bucket * (1 + variant.overlap)


def _note(misses: dict, short: str, count: int, layout: PlannedLayout, memory: LayoutMemory, judged: Fit) -> None:
    reason = f"device-memory-{memory.peak_phase}" if short == "device" else f"{short}-memory"
    known = misses.get(reason)
    nearest = (layout, memory, judged) if known is None or judged.over < known[3].over else known[1:]
    misses[reason] = ((known[0] if known else 0) + count, *nearest)


def _rated(layout: PlannedLayout, timer: Timer, correct: Correct | None) -> TimedLayout:
    """The speed in three digits, so that layouts which differ in the fourth alone are told apart by their plainness."""
    step = timer.step(layout)
    if correct:
        step = step.stretched(correct(layout, step.step_s) / step.step_s)
    return TimedLayout(layout, step, float(f"{layout.global_batch / step.step_s:.3g}"))


def _rank(one: TimedLayout) -> tuple:
    """Fastest first; of those that are alike the plainest."""
    return (-one.samples_per_s, *plain(one.layout))


def _shown(rated: list[TimedLayout], most: int, every: bool) -> list[TimedLayout]:
    """The best ones that differ in more than buckets and overlap; or all kinds of them."""
    if every:
        return rated[:most]
    seen: dict[tuple, TimedLayout] = {}
    for one in rated:
        c = one.layout
        key = (c.zero_stage, c.offload_optimizer, c.offload_param, c.micro_batch, c.tp, c.pp, c.sp, c.checkpointing)
        seen.setdefault(key, one)
        if len(seen) == most:
            break
    return list(seen.values())


def _ranked(
    one: TimedLayout, profile: Profile, cluster: Cluster, forecast: Forecast, rates: Rates, flops: float | None
) -> RankedLayout:
    memory, judged = _fit_of(one.layout, cluster, forecast)
    return RankedLayout(
        memory=memory,
        fit=judged,
        tokens_per_s=None if profile.seq_len is None else one.samples_per_s * profile.seq_len,
        mfu=one.samples_per_s * flops / (rates.peak * cluster.ranks) if rates.peak and flops else None,
        **one._asdict(),
    )


def _rejected(misses: dict, space: SearchSpace, cluster: Cluster, forecast: Forecast) -> list[Rejected]:
    rejected = []
    for reason, (count, layout, memory, judged) in misses.items():
        message, hint = why(memory, judged), remedy(layout, cluster, forecast)
        rejected.append(Rejected(reason=reason, count=count, message=message, hint=hint, layout=layout, fit=judged))
    for reason, (problem, count) in space.left_out.items():
        rejected.append(Rejected(reason=reason, count=count, message=problem.message, hint=problem.hint))
    return sorted(rejected, key=lambda r: -r.count)
