"""The search: every layout forecast, those that do not fit counted with their reasons, the rest by their speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zerofit.plan.choice import Choice, Memory
from zerofit.plan.fit import Fit, fit
from zerofit.plan.rates import Rates, rates_of
from zerofit.plan.reasons import Forecast, remedy, why
from zerofit.plan.space import Degrees, Space, Wish, degree_problem, space_of
from zerofit.plan.time import StepTime, Timer, model_flops
from zerofit.spec.calibration import Calibration
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problems, UserError
from zerofit.spec.profile import Profile, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A layout that fits, and what it does."""

    choice: Choice
    memory: Memory
    fit: Fit
    time: StepTime
    samples_per_s: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Layouts that do not fit for one reason, by the one that came nearest (None where none was forecast)."""

    reason: str  # stable slug
    count: int
    message: str
    hint: str
    choice: Choice | None = None
    memory: Memory | None = None
    fit: Fit | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search has found, best first."""

    cluster: Cluster
    rates: Rates
    ranked: list[Ranked]
    rejected: list[Rejected]
    considered: int
    seconds: float

    @property
    def nearest(self) -> Rejected | None:
        """The rejected layout that lacks least."""
        forecast = [r for r in self.rejected if r.fit]
        return min(forecast, key=lambda r: r.fit.over, default=None)


def search(
    profile: Profile, cluster: Cluster, wish: Wish, forecast: Forecast, calibration: Calibration | None = None
) -> Answer:
    """Rank all layouts. Raises UserError where degrees or batches that were asked for cannot be."""
    start = time.perf_counter()
    refuse(profile, cluster, wish)
    space = space_of(profile, cluster, wish)
    if not space.choices:
        raise UserError(*(problem for problem, _ in space.left_out.values()))
    rates = rates_of(cluster, wish.precision, calibration)
    fitting, misses = _judged(space.choices, cluster, forecast)
    timer, flops = Timer(profile, cluster, rates), _flops_or_none(profile, wish)
    ranked = [_ranked(found, timer, cluster, flops) for found in fitting]
    ranked.sort(key=_rank)
    return Answer(
        cluster=cluster,
        rates=rates,
        ranked=ranked,
        rejected=_rejected(misses, space, cluster, forecast),
        considered=len(space.choices),
        seconds=time.perf_counter() - start,
    )


def distinct(ranked: list[Ranked], most: int) -> list[Ranked]:
    """The best ones that differ in more than buckets and overlap."""
    seen: dict[tuple, Ranked] = {}
    for one in ranked:
        c = one.choice
        key = (c.zero_stage, c.offload_optimizer, c.offload_param, c.micro_batch, c.tp, c.pp, c.sp, c.checkpointing)
        seen.setdefault(key, one)
        if len(seen) == most:
            break
    return list(seen.values())


def any_fits(profile: Profile, cluster: Cluster, wish: Wish, forecast: Forecast) -> Choice | None:
    """Some layout that fits, without looking for the fastest; None where there is none."""
    for choice in reversed(space_of(profile, cluster, wish).choices):  # those that shard and offload most come last
        if fit(forecast(choice), choice, cluster).short is None:
            return choice
    return None


def refuse(profile: Profile, cluster: Cluster, wish: Wish) -> None:
    """Raise a UserError with everything that makes the asked degrees and batch impossible."""
    problems = Problems()
    if wish.tp or wish.pp or wish.sp:
        problem = degree_problem(Degrees(wish.tp or 1, wish.pp or 1, wish.sp or 1), profile, cluster)
        if problem:
            problems.extend([problem])
    if wish.global_batch and wish.micro_batch and wish.global_batch % wish.micro_batch:
        problems.add(
            "batch-size",
            f"--micro-batch {wish.micro_batch} does not divide --global-batch {wish.global_batch}",
            "leave --micro-batch out, or take one that does",
            "--micro-batch",
        )
    problems.raise_if_any()


def _judged(
    choices: list[Choice], cluster: Cluster, forecast: Forecast
) -> tuple[list[tuple[Choice, Memory, Fit]], dict[str, list]]:
    """Those that fit, and for each reason [count, the nearest miss]."""
    fitting, misses = [], {}
    for choice in choices:
        memory = forecast(choice)
        judged = fit(memory, choice, cluster)
        short = judged.short
        if short is None:
            fitting.append((choice, memory, judged))
            continue
        reason = f"device-memory-{memory.peak_phase}" if short == "device" else f"{short}-memory"
        entry = misses.setdefault(reason, [0, (choice, memory, judged)])
        entry[0] += 1
        if judged.over < entry[1][2].over:
            entry[1] = (choice, memory, judged)
    return fitting, misses


def _ranked(found: tuple[Choice, Memory, Fit], timer: Timer, cluster: Cluster, flops: float | None) -> Ranked:
    choice, memory, judged = found
    step = timer.step(choice)
    samples_per_s = choice.micro_batch * choice.accumulation * choice.dp / step.step_s
    peak = timer.rates.peak
    mfu = samples_per_s * flops / (peak * cluster.ranks) if peak and flops else None
    return Ranked(choice=choice, memory=memory, fit=judged, time=step, samples_per_s=samples_per_s, mfu=mfu)


def _rank(one: Ranked) -> tuple:
    """Fastest first; of those within a thousandth of each other the simplest, then the smallest."""
    c = one.choice
    offloads = (c.offload_optimizer != "none") + (c.offload_param != "none")
    plain = (offloads, c.tp * c.pp * c.sp, c.checkpointing, c.zero_stage, c.overlap, c.bucket)
    return (-float(f"{one.samples_per_s:.3g}"), plain, one.memory.peak_bytes)


def _rejected(misses: dict[str, list], space: Space, cluster: Cluster, forecast: Forecast) -> list[Rejected]:
    rejected = []
    for reason, (count, (choice, memory, judged)) in misses.items():
        rejected.append(
            Rejected(
                reason=reason,
                count=count,
                message=why(memory, judged),
                hint=remedy(choice, cluster, forecast),
                choice=choice,
                memory=memory,
                fit=judged,
            )
        )
    for reason, (problem, count) in space.left_out.items():
        rejected.append(Rejected(reason=reason, count=count, message=problem.message, hint=problem.hint))
    return sorted(rejected, key=lambda r: -r.count)


def _flops_or_none(profile: Profile, wish: Wish) -> float | None:
    return model_flops(profile, wish.precision) if setting(wish.precision, False, 1, 1) in profile.costs else None
