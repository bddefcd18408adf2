"""List the layouts that a plan considers: stages, offloading, degrees and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from zerofit.features.checkpointing import WORDS, Checkpointing
from zerofit.features.engines import ENGINES, Engine
from zerofit.features.optimizers import refusals, usual_optimizer
from zerofit.plan.degrees import Degrees, degree_problem, divisors
from zerofit.plan.layout import Offload, PlannedLayout
from zerofit.plan.software import USUAL, Software
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.model_facts import (
    ELEMENT_BYTES,
    bucket_elements,
    persistence_elements,
    prefetch_elements,
    width,
)
from zerofit.spec.profile import Profile, expert_degree
from zerofit.spec.run import PipelineSchedule

LARGE_BUCKET = 500_000_000  # elements; DeepSpeed's own default
MOST_FREE_MICRO_BATCH = 64  # samples, without a global batch; images get 8 times as many
IMAGES = 8
# attributes that the search decides: layouts with another value than the fixed one are dropped. Every other fixed
# attribute is set in all layouts.
SEARCHED = ("tp", "pp", "sp", "ep", "zero_stage", "offload_optimizer", "offload_param", "optimizer", "ema")
SEARCHED += ("reshard", "sync_each_batch")
MORE_GATHERED = 10  # factor on the usual prefetch and persistence sizes; they hardly change the forecast time

_SHARDED_BITS = Problem(
    kind="quantized",
    message="8-bit weights are not divided at ZeRO stage 3, and 4-bit weights are not offloaded to NVMe",
    hint="use --quantize nf4 or stage 2, and keep parameters on the device or in host memory",
    where="--quantize",
)

_NO_PIPELINE = Problem(
    kind="dualpipev-pipeline",
    message="--pipeline-schedule dualpipev needs a pipeline, but --pipeline is 1",
    hint="use --pipeline 2 or more, or leave the schedule out",
    where="--pipeline-schedule",
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The user's choices for a plan. If a choice is None, the search decides."""

    precision: str
    global_batch: int | None = None
    micro_batch: int | None = None
    by_rank: tuple[int, ...] = ()  # samples of each rank's micro batch; `micro_batch` is the largest of them
    accumulation: int | None = None
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    ep: int | None = None
    checkpointing: Checkpointing | None = None
    schedule: PipelineSchedule | None = None  # of pipelines; None: 1F1B
    pipelines: bool = True  # whether the search may divide the model into pipeline stages
    software: Software = USUAL
    every: bool = False  # rank each variant by itself, including larger stage-3 sizes
    engines: tuple[Engine, ...] = ("deepspeed",)
    weight_bytes: int = 4  # of an element of the weights that FSDP2 trains; DeepSpeed trains float32 copies
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further fixed attributes of PlannedLayout

    @property
    def degrees(self) -> Degrees:
        """The requested degrees."""
        return Degrees(self.tp or 1, self.pp or 1, self.sp or 1, self.ep or 1)


@dataclass
class SearchSpace:
    """The layouts to forecast, in families.

    The layouts of a family differ only in buckets, overlap and stage 3's sizes. The first needs the least memory.
    `left_out` has one entry per reason: the problem, and the number of choices that it makes impossible.
    """

    families: list[list[PlannedLayout]] = field(default_factory=list)
    left_out: dict[str, tuple[Problem, int]] = field(default_factory=dict)

    def leave_out(self, problem: Problem) -> None:
        """Count a choice that is impossible because of `problem`."""
        _, count = self.left_out.get(problem.kind, (problem, 0))
        self.left_out[problem.kind] = (problem, count + 1)


# The space is the product of
#
#     degrees        divisors of the ranks, a kind at a time: tensor, pipeline, sequence or expert parallelism
#     sharding       ZeRO stage, place of the optimizer's states, place of the parameters
#     recomputation  with and without activation checkpointing
#     batch          divisors of the global batch, or powers of two
#     variants       bucket size, overlap, prefetch and persistence sizes: they make a family
#
# without the combinations that DeepSpeed or zerofit refuses or that contradict a fixed value. Degrees and batch sizes
# that are impossible for every layout are counted by reason, so that the plan can name them.
def space_of(profile: Profile, cluster: Cluster, request: PlanRequest) -> SearchSpace:
    """Return every layout that satisfies the request and can run on this cluster."""
    space, sizes = SearchSpace(), stage3_sizes(profile)
    for engine in request.engines:
        if engine != "deepspeed":
            _add_by_layer(engine, profile, cluster, request, space)
    replaced = {name: value for name, value in request.fixed.items() if name not in SEARCHED}
    for degrees in _degrees(cluster, profile, request) if "deepspeed" in request.engines else ():
        schedule = request.schedule or "1f1b"
        problem = degree_problem(degrees, profile, cluster, schedule) or _untraced(degrees, profile, request)
        if schedule == "dualpipev" and degrees.pp == 1:
            problem = _NO_PIPELINE
        if problem:
            space.leave_out(problem)
            continue
        batches = list(_batches(degrees, profile, cluster, request, space))
        checkpointings = (False, True) if request.checkpointing is None else (request.checkpointing,)
        traced: list[Checkpointing] = [
            c for c in checkpointings if degrees.setting(request.precision, c) in profile.costs
        ]
        every = list(_sharding(degrees, cluster, request))
        sharding = [places for places in every if _supports_quantized(profile, places[0], places[2])]
        if every and not sharding:
            space.leave_out(_SHARDED_BITS)
        options = product(sharding, traced, batches)
        for (stage, optimizer, param), checkpointing, (micro, accumulation) in options:
            first = PlannedLayout(
                zero_stage=stage,
                micro_batch=micro,
                by_rank=request.by_rank,
                accumulation=accumulation,
                dp=cluster.ranks // degrees.product,
                tp=degrees.tp,
                pp=degrees.pp,
                sp=degrees.sp,
                ep=degrees.ep,
                schedule=schedule,
                precision=request.precision,
                checkpointing=checkpointing,
                offload_optimizer=optimizer,
                offload_param=param,
                bucket=bucket_elements(profile.trained),
                prefetch=sizes.prefetch if stage == 3 else 0,
                persistence=sizes.persistence if stage == 3 else 0,
                ema=request.fixed.get("ema"),
                optimizer=request.fixed.get("optimizer") or usual_optimizer(profile.cnn, optimizer),
            )
            if any(refusals(first.optimizer, first.optimizer_setting)):
                continue
            if first.ema and (degrees.product > 1 or optimizer == "nvme"):
                continue  # averages are kept by data parallel ranks, in memory (config/validate.py)
            if any(getattr(first, name) != value for name, value in request.fixed.items() if name in SEARCHED):
                continue
            # "auto" is filled from the first member, as training does
            auto = {name: getattr(first, name) for name, value in replaced.items() if value == "auto"}
            family = [first, *_variants(first, profile, request.every)]
            # Fixed sizes can make members of a family equal.
            family = [layout.with_sizes({**replaced, **auto}) for layout in family] if replaced else family
            space.families.append(list(dict.fromkeys(family)))
    if not space.families and not space.left_out:
        space.leave_out(_no_match(request))
    return space


def _add_by_layer(engine: Engine, profile: Profile, cluster: Cluster, request: PlanRequest, space: SearchSpace) -> None:
    if problem := _by_layer_problem(engine, profile, cluster, request):
        space.leave_out(problem)
        return
    profile = profile.of_engine(engine)
    usual: tuple[Checkpointing, ...] = tuple(WORDS) if ENGINES[engine].own_models else (False, True)
    checkpointings = usual if request.checkpointing is None else (request.checkpointing,)
    offloads: tuple[Offload, ...] = ("none",) if ENGINES[engine].flattens else ("none", "cpu")
    reductions = (False, True) if ENGINES[engine].accumulates_full_gradients else (False,)
    powers = [n for n in divisors(cluster.gpus) if ENGINES[engine].own_models or n == 1]
    for tp in [request.tp] if request.tp else powers:
        dp = cluster.ranks // tp
        groups = (1, cluster.nodes) if 1 < cluster.nodes < dp else (1,)
        batches = list(_batches(Degrees(tp=tp), profile, cluster, request, space))
        places = product(groups, (True, False) if dp > 1 else (True,), offloads, checkpointings, batches, reductions)
        for replicas, reshard, offload, checkpointing, (micro, accumulation), each in places:
            layout = PlannedLayout(
                engine=engine,
                zero_stage=3,
                micro_batch=micro,
                accumulation=accumulation,
                dp=dp,
                tp=tp,
                replicas=replicas,
                reshard=reshard,
                sync_each_batch=each,
                precision=request.precision,
                checkpointing=checkpointing,
                offload_optimizer=offload,
                offload_param=offload,
                weight_bytes=request.weight_bytes,
                bucket=0,
                overlap=True,
            )
            # with one micro batch, both values of sync_each_batch are equal
            compared = [name for name in SEARCHED if accumulation > 1 or name != "sync_each_batch"]
            matches = all(getattr(layout, name) == request.fixed.get(name, getattr(layout, name)) for name in compared)
            if matches and layout.setting in profile.costs and (accumulation > 1 or not each):
                space.families.append([layout])


def _by_layer_problem(engine: Engine, profile: Profile, cluster: Cluster, request: PlanRequest) -> Problem | None:
    degrees = request.degrees
    optimizer, own_models = request.fixed.get("optimizer", "adamw"), ENGINES[engine].own_models
    refused = {
        "on CPUs": cluster.on_cpu,
        f"for {profile.model}, which is not a decoder of transformers": profile.task != "causal-lm"
        or not profile.model_type,
        "with experts": profile.experts is not None,
        f"for {profile.model}, which is not a dense {' or '.join(own_models)} with all weights trained": (
            bool(own_models) and engine not in profile.own_models
        ),
        "with quantized weights": any(layer.quantized for layer in profile.layers),
        "with fp16": request.precision == "fp16",
        f"with bf16 weights in {request.precision}": request.weight_bytes < ELEMENT_BYTES[request.precision],
        "with bf16 weights": bool(own_models) and request.weight_bytes == 2,
        f"with {'' if own_models else 'tensor, '}pipeline, sequence or expert parallelism": (
            degrees.product * degrees.ep > (degrees.tp if own_models else 1)
        ),
        f"with {optimizer}": optimizer != "adamw",
        "with averaged weights": "ema" in request.fixed,
        "with a micro batch for each rank": bool(request.by_rank),
    }
    for what, applies in refused.items():
        if applies:
            message = f"{ENGINES[engine].title} layouts are not forecast {what}"
            hint = f"leave {engine} out of --engine, or simulate your script: zerofit simulate -- COMMAND"
            hint = "remove trainer=verl to plan TRL instead" if ENGINES[engine].only_methods else hint
            return Problem(kind="engine", message=message, hint=hint, where="--engine")
    return None


def _degrees(cluster: Cluster, profile: Profile, request: PlanRequest) -> Iterator[Degrees]:
    """Yield the requested degrees. Without a request, yield all degrees that may be possible."""
    if request.tp or request.pp or request.sp or request.ep:
        yield request.degrees
        return
    if request.schedule == "dualpipev":  # a schedule for pipelines only
        yield from (Degrees(pp=degree) for degree in divisors(cluster.ranks)[1:] or [cluster.ranks])
        return
    yield Degrees()
    spread = {expert_degree(key) for key in profile.costs if "/tp=1/sp=1" in key}
    yield from (Degrees(ep=degree) for degree in sorted(spread) if degree > 1 and cluster.ranks % degree == 0)
    layers = sum(layer.count for layer in profile.layers)
    for degree in divisors(cluster.ranks)[1:]:
        # These kinds exchange activations in every layer, so by default they stay within a node.
        if degree <= cluster.gpus:
            yield Degrees(tp=degree)
            if request.software.attn_implementation != "eager":  # Ulysses does not support it (ulysses_sp.py:468)
                yield Degrees(sp=degree)
        if request.pipelines and profile.pipelines and degree <= layers:
            yield Degrees(pp=degree)


def _untraced(degrees: Degrees, profile: Profile, request: PlanRequest) -> Problem | None:
    keys = [degrees.setting(request.precision, checkpointing) for checkpointing in WORDS]
    if any(key in profile.costs for key in keys):
        return None
    traced = dict.fromkeys(key.split("/")[0] for key in profile.costs)
    if request.precision not in traced:
        message = f"the profile of {profile.model} was traced in {', '.join(traced)}, not in {request.precision}"
        hint = f"use --precision {' or '.join(traced)}"
        return Problem(kind="not-profiled", message=message, hint=hint, where="--precision")
    message = f"the profile of {profile.model} has no costs for {keys[0]}: either this degree was not requested"
    message += ", or it does not divide every layer"
    return Problem(kind="not-profiled", message=message, hint="request the degree by its flag", where="--profile")


def _supports_quantized(profile: Profile, stage: int, offload_param: Offload) -> bool:
    """Return whether a layout supports the model's quantized weights (config/validate.py)."""
    # int8 weights have one byte each
    eight = any(layer.quantized and layer.packed == layer.quantized for layer in profile.layers)
    quantized = any(layer.quantized for layer in profile.layers)
    return not quantized or (offload_param != "nvme" and not (eight and stage == 3))


def _no_match(request: PlanRequest) -> Problem:
    fixed = {"micro_batch": request.micro_batch, "accumulation": request.accumulation, **request.fixed}
    words = ", ".join(f"{name} {value}" for name, value in fixed.items() if value is not None)
    message = f"no layout matches all fixed values: {words}, global batch {request.global_batch or 'free'}"
    return Problem(kind="decided", message=message, hint="remove some of these values, or change them")


def _sharding(degrees: Degrees, cluster: Cluster, request: PlanRequest) -> Iterator[tuple[int, Offload, Offload]]:
    fixed = request.fixed
    least = 0 if degrees.ep == 1 and request.schedule != "dualpipev" else 1  # DualPipeV: config/validate.py
    most = 1 if degrees.pp > 1 else 3  # the limit of DeepSpeed's pipeline (pipe/engine.py:73)
    if "zero_stage" in fixed and "offload_optimizer" in fixed:  # the user's own combination
        if least <= fixed["zero_stage"] <= most:
            yield fixed["zero_stage"], fixed["offload_optimizer"], fixed.get("offload_param", "none")
        return
    if least == 0:
        yield 0, "none", "none"
    yield 1, "none", "none"
    if most == 1:
        return
    yield 2, "none", "none"
    yield 3, "none", "none"
    if cluster.on_cpu and fixed.keys().isdisjoint(("offload_optimizer", "offload_param")):
        return  # host and device memory are one
    yield 2, "cpu", "none"
    yield 3, "cpu", "none"
    yield 3, "cpu", "cpu"
    if cluster.nvme_bytes:  # below stage 3 DeepSpeed uses the host instead (stage_1_and_2.py:220)
        yield 3, "nvme", "none"
        yield 3, "nvme", "cpu"
        yield 3, "nvme", "nvme"


def _batches(
    degrees: Degrees, profile: Profile, cluster: Cluster, request: PlanRequest, space: SearchSpace
) -> Iterator[tuple[int, int]]:
    """Yield pairs of micro batch and accumulation steps, enough for a pipeline's parts."""
    dp, fewest = cluster.ranks // degrees.product, pipeline_parts(degrees.pp, request.schedule or "1f1b")
    if request.global_batch is None:
        most = MOST_FREE_MICRO_BATCH * (IMAGES if profile.task in ("image", "segmentation", "table") else 1)
        micros = [request.micro_batch] if request.micro_batch else [2**n for n in range(most.bit_length())]
        if request.schedule == "dualpipev" and (request.accumulation or fewest) < fewest:
            message = f"DualPipeV with {request.accumulation} micro batches: {degrees.pp} stages need {fewest} or more"
            hint = f"use --gradient-accumulation-steps {fewest} or more"
            where = "--gradient-accumulation-steps"
            space.leave_out(Problem(kind="dualpipev-micro-batches", message=message, hint=hint, where=where))
            return
        yield from ((micro, request.accumulation or fewest) for micro in micros)
        return
    if request.global_batch % dp:
        below = request.global_batch // dp * dp
        message = f"global batch {request.global_batch} is not a multiple of the data parallel degree {dp}"
        hint = f"use {below} or {below + dp}" if below else f"use {dp}"
        space.leave_out(Problem(kind="global-batch", message=message, hint=hint, where="--global-batch"))
        return
    share = request.global_batch // dp
    for micro in divisors(share):
        wanted = request.micro_batch in (None, micro) and request.accumulation in (None, share // micro)
        if wanted and share // micro >= fewest:
            yield micro, share // micro


def _variants(first: PlannedLayout, profile: Profile, every: bool) -> list[PlannedLayout]:
    """Return a family's other layouts: larger buckets, overlap, or more gathered."""
    if first.zero_stage == 0 or first.pp > 1:
        return []
    variants = [replace(first, overlap=True)]
    if profile.trained > LARGE_BUCKET:
        variants += [replace(layout, bucket=LARGE_BUCKET) for layout in (first, variants[0])]
    if every and first.zero_stage == 3:
        prefetch, persistence = MORE_GATHERED * first.prefetch, MORE_GATHERED * first.persistence
        variants.append(replace(first, prefetch=prefetch, persistence=persistence))
    return variants


class Stage3Sizes(NamedTuple):
    """Stage 3's sizes in elements: of a prefetch, and of parameters that stay gathered."""

    prefetch: int
    persistence: int


def stage3_sizes(profile: Profile) -> Stage3Sizes:
    """Return stage 3's sizes for a model of this width."""
    numels = [numel for layer in profile.layers for numel in layer.matrices + layer.vectors + layer.frozen]
    largest = max(numels, default=1)
    hidden = width(profile.hidden_size, largest)
    return Stage3Sizes(prefetch=prefetch_elements(hidden), persistence=persistence_elements(hidden))
