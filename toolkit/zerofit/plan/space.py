"""The layouts that a plan considers: stages, offloading, degrees and batches that DeepSpeed and zerofit take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from zerofit.plan.layout import Offload, PlannedLayout
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.model_facts import (
    SEQUENCE_PARALLEL_TYPES,
    TENSOR_PARALLEL_TYPES,
    TENSOR_PLAN_TYPES,
    bucket_elements,
    persistence_elements,
    prefetch_elements,
    width,
)
from zerofit.spec.profile import Profile, setting

LARGE_BUCKET = 500_000_000  # elements; DeepSpeed's own default
MOST_FREE_MICRO_BATCH = 64  # samples, where no global batch bounds it; images get 8 times as many
IMAGES = 8
SIZES = ("bucket", "overlap", "prefetch", "persistence")  # knobs in which the members of a family differ
MORE_GATHERED = 10  # times the usual prefetch and persistence sizes, which the forecast of times knows little of

_SHARDED_BITS = Problem(
    kind="quantized",
    message="plan has no formula for quantised weights at ZeRO stage 3, where what is gathered stays until backward",
    hint="take stage 2: they are small and are not trained; `zerofit simulate` takes stage 3",
    where="--quantize",
)


class Degrees(NamedTuple):
    """Parallel degrees beside data parallelism. The search takes one above 1 by itself, and more where it is asked."""

    tp: int = 1
    pp: int = 1
    sp: int = 1

    @property
    def product(self) -> int:
        """Ranks that work on the same samples."""
        return self.tp * self.pp * self.sp

    @property
    def combined(self) -> bool:
        """Whether more than one is above 1."""
        return sum(degree > 1 for degree in self) > 1

    def alone(self) -> Iterator[Degrees]:
        """Yield each degree above 1 by itself: pipeline, tensor, sequence."""
        found = (Degrees(pp=self.pp), Degrees(tp=self.tp), Degrees(sp=self.sp))
        return (one for one in found if one.product > 1)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The user's choices for a plan; None leaves one to the search."""

    precision: str
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    tp: int | None = None
    pp: int | None = None
    sp: int | None = None
    checkpointing: bool | None = None
    pipelines: bool = True  # whether the search may cut the model into pipeline stages
    every: bool = False  # each variant is ranked by itself, and stage 3 with larger sizes is one
    keep: Mapping[str, Any] = field(default_factory=dict)  # further knobs of PlannedLayout that are decided


@dataclass
class SearchSpace:
    """Layouts to forecast, and what was left out before any forecast: reason -> problem, with how often.

    A family's members differ in buckets, overlap and stage 3's sizes alone; the first needs least memory.
    """

    families: list[list[PlannedLayout]] = field(default_factory=list)
    left_out: dict[str, tuple[Problem, int]] = field(default_factory=dict)

    def leave_out(self, problem: Problem) -> None:
        """Note one degree or batch that is impossible."""
        _, count = self.left_out.get(problem.kind, (problem, 0))
        self.left_out[problem.kind] = (problem, count + 1)


def space_of(profile: Profile, cluster: Cluster, request: PlanRequest) -> SearchSpace:
    """Return every layout that can be run on this cluster as requested."""
    space, sizes = SearchSpace(), stage3_sizes(profile)
    quantized = any(layer.quantized for layer in profile.layers)
    for degrees in _degrees(cluster, profile, request):
        problem = degree_problem(degrees, profile, cluster) or _untraced(degrees, profile, request)
        if problem:
            space.leave_out(problem)
            continue
        batches = list(_batches(degrees, profile, cluster, request, space))
        asked = (False, True) if request.checkpointing is None else (request.checkpointing,)
        traced = [c for c in asked if setting(request.precision, c, degrees.tp, degrees.sp) in profile.costs]
        sharding = [one for one in _sharding(degrees, cluster, request) if one[0] < 3 or not quantized]
        if not sharding:
            space.leave_out(_SHARDED_BITS)
        options = product(sharding, traced, batches)
        for (stage, optimizer, param), checkpointing, (micro, accumulation) in options:
            first = PlannedLayout(
                zero_stage=stage,
                micro_batch=micro,
                accumulation=accumulation,
                dp=cluster.ranks // degrees.product,
                tp=degrees.tp,
                pp=degrees.pp,
                sp=degrees.sp,
                precision=request.precision,
                checkpointing=checkpointing,
                offload_optimizer=optimizer,
                offload_param=param,
                bucket=bucket_elements(profile.trained),
                prefetch=sizes.prefetch if stage == 3 else 0,
                persistence=sizes.persistence if stage == 3 else 0,
            )
            kept = {name: value for name, value in request.keep.items() if name in SIZES}
            if any(getattr(first, name) != value for name, value in request.keep.items() if name not in kept):
                continue
            family = [first, *_variants(first, profile, request.every)]
            space.families.append(list(dict.fromkeys(replace(one, **kept) for one in family)))
    if not space.families and not space.left_out:
        space.leave_out(_decided(request))
    return space


def _degrees(cluster: Cluster, profile: Profile, request: PlanRequest) -> Iterator[Degrees]:
    """Yield all degrees that may be possible, or those that were asked for."""
    if request.tp or request.pp or request.sp:
        yield Degrees(request.tp or 1, request.pp or 1, request.sp or 1)
        return
    yield Degrees()
    layers = sum(layer.count for layer in profile.layers)
    for degree in divisors(cluster.ranks)[1:]:
        if degree <= cluster.gpus:
            yield Degrees(tp=degree)
            yield Degrees(sp=degree)
        if request.pipelines and profile.pipelines and degree <= layers:
            yield Degrees(pp=degree)


def _untraced(degrees: Degrees, profile: Profile, request: PlanRequest) -> Problem | None:
    keys = [setting(request.precision, checkpointing, degrees.tp, degrees.sp) for checkpointing in (False, True)]
    if any(key in profile.costs for key in keys):
        return None
    traced = dict.fromkeys(key.split("/")[0] for key in profile.costs)
    if request.precision not in traced:
        message = f"the profile of {profile.model} was traced in {', '.join(traced)}, not in {request.precision}"
        hint = f"take --precision {' or '.join(traced)}"
        return Problem(kind="not-profiled", message=message, hint=hint, where="--precision")
    message = f"{keys[0]} of {profile.model} is not in its profile: not asked for, or a layer that does not divide"
    return Problem(kind="not-profiled", message=message, hint="ask for the degree by its flag", where="--profile")


def _decided(request: PlanRequest) -> Problem:
    knobs = {"micro_batch": request.micro_batch, "accumulation": request.accumulation, **request.keep}
    words = ", ".join(f"{name} {value}" for name, value in knobs.items() if value is not None)
    message = f"no layout has all that is decided: {words}, global batch {request.global_batch or 'free'}"
    return Problem(kind="decided", message=message, hint="decide less, or other values")


def _sharding(degrees: Degrees, cluster: Cluster, request: PlanRequest) -> Iterator[tuple[int, Offload, Offload]]:
    """Yield ZeRO stage, where the optimizer's states are, where parameters are."""
    keep = request.keep
    if "zero_stage" in keep and "offload_optimizer" in keep:  # a combination of the user's own
        yield keep["zero_stage"], keep["offload_optimizer"], keep.get("offload_param", "none")
        return
    if degrees.pp == 1 or request.precision != "fp32":  # of which plan has no formula yet
        yield 0, "none", "none"
    yield 1, "none", "none"
    if degrees.pp > 1:  # DeepSpeed's pipeline takes no more (pipe/engine.py:73)
        return
    yield 2, "none", "none"
    yield 3, "none", "none"
    if cluster.on_cpu and keep.keys().isdisjoint(("offload_optimizer", "offload_param")):
        return  # host memory is the device's
    yield 2, "cpu", "none"
    yield 3, "cpu", "none"
    yield 3, "cpu", "cpu"
    if cluster.nvme_bytes:  # below stage 3 DeepSpeed takes the host instead (stage_1_and_2.py:220)
        yield 3, "nvme", "none"
        yield 3, "nvme", "cpu"
        yield 3, "nvme", "nvme"


def _batches(
    degrees: Degrees, profile: Profile, cluster: Cluster, request: PlanRequest, space: SearchSpace
) -> Iterator[tuple[int, int]]:
    """Yield micro batch and accumulation steps; a pipeline gets at least one micro batch per stage."""
    dp = cluster.ranks // degrees.product
    if request.global_batch is None:
        most = MOST_FREE_MICRO_BATCH * (IMAGES if profile.task in ("image", "table") else 1)
        micros = [request.micro_batch] if request.micro_batch else [2**n for n in range(most.bit_length())]
        yield from ((micro, request.accumulation or degrees.pp) for micro in micros)
        return
    if request.global_batch % dp:
        below = request.global_batch // dp * dp
        message = f"global batch {request.global_batch} is not a multiple of the data parallel degree {dp}"
        hint = f"take {below} or {below + dp}" if below else f"take {dp}"
        space.leave_out(Problem(kind="global-batch", message=message, hint=hint, where="--global-batch"))
        return
    share = request.global_batch // dp
    for micro in divisors(share):
        wanted = request.micro_batch in (None, micro) and request.accumulation in (None, share // micro)
        if wanted and share // micro >= degrees.pp:
            yield micro, share // micro


def _variants(first: PlannedLayout, profile: Profile, every: bool) -> list[PlannedLayout]:
    """Return the same with larger buckets, with gradients reduced during backward, and with more kept gathered."""
    if first.zero_stage == 0 or first.pp > 1:
        return []
    variants = [replace(first, overlap=True)]
    if profile.trained > LARGE_BUCKET:
        variants += [replace(one, bucket=LARGE_BUCKET) for one in (first, variants[0])]
    if every and first.zero_stage == 3:
        more = MORE_GATHERED
        variants.append(replace(first, prefetch=more * first.prefetch, persistence=more * first.persistence))
    return variants


class Stage3Sizes(NamedTuple):
    """Elements that stage 3 gathers ahead, and below which a parameter stays gathered."""

    prefetch: int
    persistence: int


def stage3_sizes(profile: Profile) -> Stage3Sizes:
    """Return the sizes that follow from the model's width."""
    numels = [numel for layer in profile.layers for numel in layer.matrices + layer.vectors + layer.frozen]
    largest = max(numels, default=1)
    hidden = width(profile.hidden_size, largest)
    return Stage3Sizes(prefetch=prefetch_elements(hidden), persistence=persistence_elements(hidden))


def settings_of(heads: tuple[int | None, int | None], model_type: str | None, most: int) -> list[Degrees]:
    """Return the degrees up to `most` worth tracing for a model of these attention and key-value heads."""
    powers = [2**n for n in range(1, most.bit_length()) if 2**n <= most]
    found = [degrees for n in powers for degrees in (Degrees(tp=n), Degrees(sp=n))]
    return [Degrees(), *(degrees for degrees in found if heads_take(degrees, heads, model_type))]


def heads_take(degrees: Degrees, heads: tuple[int | None, int | None], model_type: str | None) -> bool:
    """Return whether tensor and sequence parallelism can divide a model of these attention and key-value heads so."""
    if degrees.tp * degrees.sp == 1:
        return True
    able = all(model_type in types_of(one, degrees.combined) for one in degrees.alone())
    return able and any(heads) and not any(_undivided(degrees, heads))


def _undivided(degrees: Degrees, heads: tuple[int | None, int | None]) -> tuple[bool, bool]:
    """Return whether attention and key-value heads are not divided: over tensor ranks, then each's over sequence ranks.

    Ulysses repeats key-value heads where there are fewer of them than sequence ranks
    (deepspeed/runtime/sequence_parallel/ulysses_sp.py).
    """
    attention, keys = (count or 0 for count in heads)
    share = keys // degrees.tp
    repeated = keys % degrees.tp == 0 and bool(share) and degrees.sp % share == 0
    product = degrees.tp * degrees.sp
    return bool(attention % product), bool(keys % product) and not repeated


def types_of(degrees: Degrees, beside: bool) -> tuple[str, ...]:
    """Return the model types that tensor or sequence parallelism takes, by itself or `beside` another dimension."""
    if degrees.tp > 1:
        return TENSOR_PLAN_TYPES if beside else TENSOR_PARALLEL_TYPES
    return SEQUENCE_PARALLEL_TYPES


def degree_problem(degrees: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    """Say why these degrees are impossible for this model and cluster; None where they are not."""
    if cluster.ranks % degrees.product:
        if degrees.combined:
            names, product = " x ".join(f"{name} {n}" for name, n in map(_named, degrees.alone())), degrees.product
            message, hint = f"{names} does not divide {cluster.ranks} ranks", f"take a multiple of {product} ranks"
            return Problem(kind="degree-ranks", message=message, hint=hint, where="--gpus, --nodes")
        name, degree = _named(degrees)
        fitting = [d for d in divisors(cluster.ranks) if d > 1 and _model_takes(degrees, d, profile)] or [1]
        message, hint = f"{name} {degree} does not divide {cluster.ranks} ranks", f"degrees that do: {_list(fitting)}"
        return Problem(kind="degree-ranks", message=message, hint=hint, where=name)
    if degrees.tp > 1 and profile.trained < profile.parameters:
        message = f"--tensor-parallel {degrees.tp}: DeepSpeed's AutoTP loses adapters, and trains frozen layers"
        return Problem(kind="tensor-parallel-part", message=message, hint="leave it at 1", where="--tensor-parallel")
    for one in degrees.alone():
        problem = _pipeline_problem(one.pp, profile) if one.pp > 1 else _heads_problem(one, degrees, profile, cluster)
        if problem:
            return problem
    return None


def _pipeline_problem(pp: int, profile: Profile) -> Problem | None:
    layers = sum(layer.count for layer in profile.layers if layer.matrices or layer.vectors)
    if not profile.pipelines:
        message = f"--pipeline {pp} needs a model that can be cut into stages, which {profile.model} is not"
        return Problem(kind="pipeline-model", message=message, hint="leave it at 1", where="--pipeline")
    if pp <= layers:
        return None
    some = " that are trained" if profile.trained < profile.parameters else ""
    message = f"--pipeline {pp} needs at least as many layers, and {profile.model} has {layers}{some}"
    return Problem(kind="pipeline-layers", message=message, hint=f"take {layers} or less", where="--pipeline")


def _heads_problem(degrees: Degrees, whole: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    """Look at one of the degrees `whole`: sequence ranks share the heads that each tensor rank has."""
    name, degree = _named(degrees)
    types = types_of(degrees, whole.combined)
    kind = "tensor-parallel" if degrees.tp > 1 else "sequence-parallel"
    if profile.attention_heads is None or profile.model_type not in types:
        what = "AutoTP is not known to split" if degrees.tp > 1 else "Ulysses attention does not fit"
        message = f"{name} {degree}: DeepSpeed's {what} {profile.model_type or profile.model}"
        return Problem(kind=f"{kind}-model", message=message, hint=f"model types: {', '.join(types)}", where=name)
    sharers = whole.tp if degrees.sp > 1 else 1
    heads = profile.attention_heads, profile.kv_heads
    undivided = _undivided(Degrees(tp=degrees.tp * sharers, sp=degrees.sp), heads)
    for count, what, bad in zip(heads, ("attention heads", "key-value heads"), undivided, strict=True):
        if bad:
            hint = f"degrees that do: {_list(_taken(degrees, profile, sharers))}"
            beside = f" beside --tensor-parallel {sharers}" if sharers > 1 else ""
            message = f"{name} {degree}{beside} does not divide the {count} {what} of {profile.model}"
            return Problem(kind=f"{kind}-heads", message=message, hint=hint, where=name)
    if degrees.tp > 1 and cluster.gpus % degree:
        fitting = [d for d in _taken(degrees, profile) if cluster.gpus % d == 0]
        message = f"{name} {degree} does not stay within nodes of {cluster.gpus} ranks"
        return Problem(kind="tensor-parallel-node", message=message, hint=f"degrees that do: {_list(fitting)}")
    if degrees.sp > 1 and profile.seq_len and profile.seq_len % degree:
        message = f"{name} {degree} does not divide {profile.seq_len} tokens"
        hint = f"take --seq-len {profile.seq_len // degree * degree or degree}"
        return Problem(kind="sequence-parallel-length", message=message, hint=hint, where=name)
    return None


def _model_takes(degrees: Degrees, degree: int, profile: Profile) -> bool:
    """Return whether the model takes another degree of the same kind."""
    if degrees.pp > 1:
        return _pipeline_problem(degree, profile) is None
    other = Degrees(tp=degree) if degrees.tp > 1 else Degrees(sp=degree)
    return heads_take(other, (profile.attention_heads, profile.kv_heads), profile.model_type)


def _taken(degrees: Degrees, profile: Profile, sharers: int = 1) -> list[int]:
    """Return degrees of this kind that the model takes: those that divide its heads and, for `sp`, its tokens.

    `sharers`: tensor ranks that each have a part of the heads.
    """
    heads = profile.attention_heads, profile.kv_heads
    found = divisors(max(1, (profile.attention_heads or 1) // sharers))
    if degrees.sp > 1:
        fitting = [d for d in found if (profile.seq_len or 0) % d == 0]
        return [d for d in fitting if not any(_undivided(Degrees(tp=sharers, sp=d), heads))]
    return [d for d in found if not any(_undivided(Degrees(tp=d), heads))]


def _named(degrees: Degrees) -> tuple[str, int]:
    names = ("--tensor-parallel", "--pipeline", "--sequence-parallel")
    return next((name, degree) for name, degree in zip(names, degrees, strict=True) if degree > 1)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16]))
