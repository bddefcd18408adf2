"""Search layouts: forecast all, count those that do not fit, and rank the others by speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from zerofit.features.optimizers import OPTIMIZERS
from zerofit.plan.degrees import degree_problem
from zerofit.plan.fit import CLOSE, Fit, Forecast, check_fit, explain, remedy
from zerofit.plan.kernels import kernel_s
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.measured_rates import unaligned_lengths
from zerofit.plan.outlook import errors_of
from zerofit.plan.rates import FITTED, Coefficients, Rates, rates_of
from zerofit.plan.result import FrontierLayout, PlanResult, RankedLayout, Rejected, plain
from zerofit.plan.space import PlanRequest, SearchSpace, space_of
from zerofit.plan.time import StepTime, Timer, model_flops
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problems, UserError
from zerofit.spec.local_machine import Calibration
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.overhead import HOST_RESERVE
from zerofit.spec.process import collector_off
from zerofit.spec.profile import Linear, Profile, setting

MOST_CLOSE = 3  # layouts close to the limit to show
PADDED = 64  # sizes are padded to a multiple of this, which tensor cores of all generations run at full speed

Correct = Callable[[PlannedLayout, float], float]


class TimedLayout(NamedTuple):
    """A layout that fits, with its speed."""

    layout: PlannedLayout
    time: StepTime
    samples_per_s: float


class Misfits(NamedTuple):
    """Layouts that do not fit for one reason. The one that needs the least memory is kept."""

    count: int
    layout: PlannedLayout
    memory: LayoutMemory
    fit: Fit


# The search forecasts every layout of the space; nothing is sampled.
#
#     1. The space comes in families: layouts that differ in bucket, overlap and stage-3 sizes only. The first
#        needs the least memory. If it does not fit, no layout of its family fits.
#     2. Other members of a family that fits are forecast only if larger buckets could exceed the memory that is left.
#     3. Layouts that fit are timed and sorted by samples per second in three digits. Equally fast layouts are sorted by
#        simplicity.
#     4. Layouts that do not fit are counted by reason. For each reason the message describes the layout that is nearest
#        to fitting, with a remedy.
@collector_off()  # a tenth of the time; a search leaves no cycles
def search(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    forecast: Forecast,
    calibration: Calibration | None = None,
    top: int = 10,
    correct: Correct | None = None,
) -> PlanResult:
    """Rank all layouts.

    Raises UserError if the degrees or batch sizes of the request are impossible.

    `correct`: a function that returns a layout's corrected step time and its forecast step time, in seconds.
    """
    start = time.perf_counter()
    refuse(profile, cluster, request)
    space = space_of(profile, cluster, request)
    if not space.families:
        raise UserError(*(problem for problem, _ in space.left_out.values()))
    timer = timer_of(profile, cluster, request, calibration)
    fitting, misfits, too_large = _divide(space.families, cluster, forecast)
    pairs = [(_timed(layout, timer, correct), least_bytes) for layout, least_bytes in fitting]
    # fastest first; the simplest of equally fast layouts comes first
    pairs.sort(key=lambda pair: (-pair[0].samples_per_s, *plain(pair[0].layout)))
    timed = [timed_layout for timed_layout, _ in pairs]
    plain_setting = setting(request.precision, False, 1, 1)
    flops = model_flops(profile, request.precision) if plain_setting in profile.costs else None
    best = _best(timed, top, request.every)
    near = [] if request.every else [_fastest(family, timer, correct) for _, family in too_large[: top - len(best)]]
    close = [] if request.every else _close(too_large, best, timer, correct)
    listed = (*best, *near, *close)
    ranked = [_ranked(timed_layout, profile, cluster, forecast, timer.rates, flops) for timed_layout in listed]
    if correct is None and not cluster.on_cpu:  # the error figures are for uncorrected forecasts
        facts = profile.task, profile.seq_len, cluster.nodes
        ranked = [replace(row, errors=errors_of(row.layout, *facts)) for row in ranked]
    return PlanResult(
        model=profile.model,
        parameters=profile.parameters,
        seq_len=profile.seq_len,
        precision=request.precision,
        cluster=cluster,
        rates=timer.rates,
        layouts=tuple(ranked[: len(best)]),
        misfits=tuple(ranked[len(best) : len(best) + len(near)]),
        close=tuple(ranked[len(best) + len(near) :]),
        frontier=tuple(_frontier(pairs, cluster, forecast)),
        padding=_padding(profile, ranked[0], timer) if ranked else "",
        rejections=tuple(_rejections(misfits, space, cluster, forecast)),
        considered=sum(map(len, space.families)),
        fitting=len(fitting),
        seconds=time.perf_counter() - start,
    )


def timer_of(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    calibration: Calibration | None = None,
    fitted: Coefficients = FITTED,
) -> Timer:
    """Return a `Timer` with the cluster's rates and the request's software."""
    software = request.software
    rates = rates_of(cluster, request.precision, calibration, software, fitted)
    return Timer(profile, cluster, rates)


def _padding(profile: Profile, best: RankedLayout, timer: Timer) -> str:
    """Return a hint on which sizes to pad, and what this saves; "" if it saves less than 1 %."""
    layout, lengths, slow_s, padded_s = best.layout, set[int](), 0.0, 0.0
    costs = profile.of_engine(layout.engine).costs[layout.setting]
    for layer, count in timer.parts(layout).rank_pass.slowest:  # in a pipeline, other stages wait for this one
        cost = costs[layer]
        for kernel in (*cost.forward_kernels, *cost.backward_kernels):
            if unaligned := unaligned_lengths(kernel):
                lengths |= set(unaligned)
                shape = tuple(size if size.per_sample else Linear(fixed=_padded(size.fixed)) for size in kernel.shape)
                times = count * layout.accumulation
                slow_s += times * kernel_s(kernel, layout.micro_batch, timer.rates)
                padded_s += times * kernel_s(replace(kernel, shape=shape), layout.micro_batch, timer.rates)
    if slow_s - padded_s < 0.01 * best.step_s:
        return ""
    pairs = ", ".join(f"{n:,} to {_padded(n):,}" for n in sorted(lengths))
    return (
        f"padding {pairs} saves {(slow_s - padded_s) / best.step_s:.0%} of a step: matrix products with sizes that are "
        f"not a multiple of 8 run {slow_s / padded_s:.1f} times as long (for a vocabulary: "
        f"--model-args '{{\"vocab_size\": {_padded(max(lengths))}}}')"
    )


def _padded(size: float) -> int:
    return math.ceil(size / PADDED) * PADDED


def pressure(profile: Profile, cluster: Cluster, request: PlanRequest, forecast: Forecast) -> float:
    """Return the lowest `_utilization` of all layouts. If it is above 1, no layout fits."""
    families = space_of(profile, cluster, request).families
    return min((_utilization(family[0], profile, cluster, forecast) for family in families), default=math.inf)


def _utilization(layout: PlannedLayout, profile: Profile, cluster: Cluster, forecast: Forecast) -> float:
    """Return the utilization of the fullest memory, or a lower bound if that is far above 1."""
    if layout.pp > 1:
        # Dividing hundreds of layers into pipeline stages takes seconds, so it is skipped if a rank's part of weights
        # and optimizer states in an average stage is already too large. A pipeline runs at ZeRO stage 0 or 1, so both
        # are on the device.
        quantized = sum(layer.count * sum(layer.quantized) for layer in profile.layers)
        states = OPTIMIZERS[layout.optimizer].states.least_bytes * profile.trained
        least = layout.element_bytes * (profile.parameters - quantized)
        least += states / (layout.zero_ranks if layout.zero_stage else 1)
        least /= layout.pp * layout.tp * layout.ep
        if least > cluster.device.memory_bytes:
            return least / cluster.device.memory_bytes
    return _forecast_fit(layout, cluster, forecast)[1].utilization


def host_needed(profile: Profile, cluster: Cluster, request: PlanRequest, forecast: Forecast) -> float | None:
    """Return the least host memory per node with which a layout fits, in bytes.

    The result is None if more host memory does not help.
    """
    ample = replace(cluster, host_memory=10**18)
    fits = [_forecast_fit(family[0], ample, forecast)[1] for family in space_of(profile, cluster, request).families]
    return min((fit.host_bytes / (1 - HOST_RESERVE) for fit in fits if fit.exceeded is None), default=None)


def refuse(profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
    """Raise a UserError with everything that makes the degrees and batch size impossible."""
    problems = Problems()
    problem = degree_problem(request.degrees, profile, cluster, request.schedule or "1f1b")
    problems.extend([problem] if problem else [])
    if (request.sp or 1) > 1 and request.software.attn_implementation == "eager":
        problems.add(
            "layout",
            f"--sequence-parallel {request.sp} with eager attention, which DeepSpeed's Ulysses does not support",
            "use --attn-implementation sdpa or a flash_attention",
            "--sequence-parallel, --attn-implementation",
        )
    if request.global_batch and request.micro_batch and request.global_batch % request.micro_batch:
        problems.add(
            "batch-size",
            f"--micro-batch {request.micro_batch} does not divide --global-batch {request.global_batch}",
            "leave out --micro-batch, or use a divisor of the global batch",
            "--micro-batch",
        )
    problems.raise_if_any()


def _forecast_fit(layout: PlannedLayout, cluster: Cluster, forecast: Forecast) -> tuple[LayoutMemory, Fit]:
    """Forecast a layout's memory, and compare it with the cluster's."""
    # a pipeline is full with as many micro batches as parts, and gradients exist with one more: further micro batches
    # do not change the memory, but would need a forecast of their own
    most = pipeline_parts(layout.pp, layout.schedule) + 1
    memory = forecast(layout if layout.accumulation <= most else replace(layout, accumulation=most))
    return memory, check_fit(memory, layout, cluster)


def _divide(
    families: list[list[PlannedLayout]], cluster: Cluster, forecast: Forecast
) -> tuple[list[tuple[PlannedLayout, int]], dict[str, Misfits], list[tuple[Fit, list[PlannedLayout]]]]:
    """Return the layouts that fit, those that do not (by reason), and the families that do not.

    Each layout that fits is paired with the peak of its family's first layout, in bytes.
    """
    fitting: list[tuple[PlannedLayout, int]] = []
    misfits: dict[str, Misfits] = {}
    too_large: list[tuple[Fit, list[PlannedLayout]]] = []
    for family in families:
        memory, fit = _forecast_fit(family[0], cluster, forecast)
        if fit.exceeded:  # the first layout of a family needs the least memory
            too_large.append((fit, family))
            _count(misfits, Misfits(len(family), family[0], memory, fit))
            continue
        least_bytes = memory.peak_bytes
        fitting.append((family[0], least_bytes))
        spare = fit.device_available_bytes - fit.device_bytes
        for variant in family[1:]:
            # upper limit of what buckets add: in float32, flattened, sent and received, twice with overlap
            added = 4 * 4 * variant.bucket * (1 + variant.overlap)
            if variant.persistence != family[0].persistence or added > spare:
                memory, fit = _forecast_fit(variant, cluster, forecast)
                if fit.exceeded:
                    _count(misfits, Misfits(1, variant, memory, fit))
                    continue
            fitting.append((variant, least_bytes))
    too_large.sort(key=lambda pair: pair[0].utilization)
    return fitting, misfits, too_large


def _count(misfits: dict[str, Misfits], misfit: Misfits) -> None:
    """Add a misfit to those with the same reason."""
    memory = misfit.fit.exceeded
    reason = f"device-memory-{misfit.memory.peak_phase}" if memory == "device" else f"{memory}-memory"
    known = misfits.get(reason)
    if known:
        nearest = misfit if misfit.fit.utilization < known.fit.utilization else known
        misfit = nearest._replace(count=known.count + misfit.count)
    misfits[reason] = misfit


def _timed(layout: PlannedLayout, timer: Timer, correct: Correct | None) -> TimedLayout:
    """Forecast the time of a layout."""
    step = timer.step(layout)
    if correct:
        step = step.scaled(correct(layout, step.step_s) / step.step_s)
    # rounded to three digits, so that the simplest of nearly equal layouts comes first
    return TimedLayout(layout, step, float(f"{layout.global_batch / step.step_s:.3g}"))


def _fastest(family: list[PlannedLayout], timer: Timer, correct: Correct | None) -> TimedLayout:
    return max((_timed(layout, timer, correct) for layout in family), key=lambda layout: layout.samples_per_s)


def _close(
    too_large: list[tuple[Fit, list[PlannedLayout]]], best: list[TimedLayout], timer: Timer, correct: Correct | None
) -> list[TimedLayout]:
    """Return layouts that are faster than the best and fit without their margin, fastest first."""
    close = [_timed(family[0], timer, correct) for fit, family in too_large if fit.verdict == CLOSE]
    least = best[0].samples_per_s if best else 0.0
    return sorted((row for row in close if row.samples_per_s > least), key=lambda row: -row.samples_per_s)[:MOST_CLOSE]


def _best(timed: list[TimedLayout], most: int, every: bool) -> list[TimedLayout]:
    """Return the first `most` layouts.

    Without `every`, only the first of the layouts that differ just in bucket sizes and overlap is returned.
    """
    if every:
        return timed[:most]
    seen: dict[tuple, TimedLayout] = {}
    for timed_layout in timed:
        of = timed_layout.layout
        key = (of.zero_stage, of.offload_optimizer, of.offload_param, of.micro_batch, of.tp, of.pp, of.sp, of.ep)
        key += (of.checkpointing, of.engine, of.reshard, of.replicas, of.sync_each_batch)
        seen.setdefault(key, timed_layout)
        if len(seen) == most:
            break
    return list(seen.values())


def _frontier(pairs: list[tuple[TimedLayout, int]], cluster: Cluster, forecast: Forecast) -> Iterator[FrontierLayout]:
    """Yield the layouts that no other layout beats in both speed and memory, fastest first.

    `pairs`: layouts, fastest first. Each is paired with the smallest peak in its family, in bytes.
    """
    lowest = math.inf
    for timed, least_bytes in pairs:
        if least_bytes < lowest and (size := _forecast_fit(timed.layout, cluster, forecast)[0].peak_bytes) < lowest:
            lowest = size
            yield FrontierLayout(layout=str(timed.layout), peak_bytes=size, samples_per_s=timed.samples_per_s)


def _ranked(
    timed: TimedLayout, profile: Profile, cluster: Cluster, forecast: Forecast, rates: Rates, flops: float | None
) -> RankedLayout:
    memory, fit = _forecast_fit(timed.layout, cluster, forecast)
    return RankedLayout(
        memory=memory,
        fit=fit,
        tokens_per_s=None if profile.seq_len is None else timed.samples_per_s * profile.seq_len,
        mfu=timed.samples_per_s * flops / (rates.peak * cluster.ranks) if rates.peak and flops else None,
        **timed._asdict(),
    )


def _rejections(
    misfits: dict[str, Misfits], space: SearchSpace, cluster: Cluster, forecast: Forecast
) -> list[Rejected]:
    rejected = []
    for reason, (count, layout, memory, fit) in misfits.items():
        message, hint = explain(memory, fit), remedy(layout, cluster, forecast)
        rejected.append(Rejected(reason=reason, count=count, message=message, hint=hint, layout=layout, fit=fit))
    for reason, (problem, count) in space.left_out.items():
        rejected.append(Rejected(reason=reason, count=count, message=problem.message, hint=problem.hint))
    return sorted(rejected, key=lambda r: -r.count)
