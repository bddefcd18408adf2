"""Check which parallel degrees a model and a cluster support, and why others are impossible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerofit.features.checkpointing import Checkpointing
from zerofit.plan.pipeline import stage_bounds
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.mesh import parts_of_stage, pipeline_parts
from zerofit.spec.model_facts import (
    EXPERT_TYPES,
    SEQUENCE_PARALLEL_TYPES,
    TENSOR_PARALLEL_TYPES,
    TENSOR_PLAN_TYPES,
)
from zerofit.spec.profile import Profile, setting
from zerofit.spec.run import PipelineSchedule


class Degrees(NamedTuple):
    """Parallel degrees besides data parallelism, which the search combines only on request."""

    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1  # uses data parallel ranks

    @property
    def product(self) -> int:
        """The number of ranks that work on the same samples."""
        return self.tp * self.pp * self.sp

    @property
    def combined(self) -> bool:
        """Whether at least two of tp, pp and sp are above 1."""
        return sum(degree > 1 for degree in self[:3]) > 1

    def setting(self, precision: str, checkpointing: Checkpointing) -> str:
        """Return the key of these degrees in `Profile.costs`."""
        return setting(precision, checkpointing, self.tp, self.sp, self.ep)

    def beside_plain(self) -> tuple[Degrees, ...]:
        """Return the degrees to trace for a profile: without parallelism, and this one with pp=1."""
        return tuple(dict.fromkeys((Degrees(), self._replace(pp=1))))

    def alone(self) -> Iterator[Degrees]:
        """Yield the pipeline, tensor and sequence degrees above 1, one at a time."""
        singles = (Degrees(pp=self.pp), Degrees(tp=self.tp), Degrees(sp=self.sp))
        return (single for single in singles if single.product > 1)


def settings_of(
    heads: tuple[int | None, int | None], model_type: str | None, most: int, experts: int | None = None
) -> list[Degrees]:
    """Return the degrees that a model supports, one kind of parallelism at a time.

    The degrees are powers of two up to `most`. The first result has no parallelism. `heads`: the numbers of
    attention heads and of key-value heads.
    """
    powers = [2**n for n in range(1, most.bit_length())]
    divided = [degrees for n in powers for degrees in (Degrees(tp=n), Degrees(sp=n))]
    spread = [Degrees(ep=n) for n in powers if model_type in EXPERT_TYPES and (experts or 1) % n == 0]
    return [Degrees(), *(degrees for degrees in divided if heads_take(degrees, heads, model_type)), *spread]


def heads_take(degrees: Degrees, heads: tuple[int | None, int | None], model_type: str | None) -> bool:
    """Return whether tensor and sequence parallelism can divide a model.

    `heads`: the numbers of attention heads and of key-value heads. The model's type must be supported, too.
    """
    if degrees.tp * degrees.sp == 1:
        return True
    able = all(model_type in types_of(single, degrees.combined) for single in degrees.alone())
    return able and any(heads) and not any(_undivided(degrees, heads))


def _undivided(degrees: Degrees, heads: tuple[int | None, int | None]) -> tuple[bool, bool]:
    """Return whether the ranks cannot divide the attention heads, and the key-value heads."""
    attention, keys = (count or 0 for count in heads)
    share = keys // degrees.tp
    # Ulysses repeats key-value heads that are fewer than its ranks (deepspeed/runtime/sequence_parallel/ulysses_sp.py)
    repeated = keys % degrees.tp == 0 and bool(share) and degrees.sp % share == 0
    product = degrees.tp * degrees.sp
    return bool(attention % product), bool(keys % product) and not repeated


def types_of(degrees: Degrees, combined: bool) -> tuple[str, ...]:
    """Return the model types that support this degree, alone or `combined` with another."""
    if degrees.tp > 1:
        return TENSOR_PLAN_TYPES if combined else TENSOR_PARALLEL_TYPES
    return SEQUENCE_PARALLEL_TYPES


def degree_problem(
    degrees: Degrees, profile: Profile, cluster: Cluster, schedule: PipelineSchedule = "1f1b"
) -> Problem | None:
    """Return the problem of degrees for a model and a cluster; None if they are possible."""
    if problem := ranks_problem(degrees, cluster.ranks):
        return problem
    if degrees.tp > 1 and profile.trained < profile.parameters:
        message = f"--tensor-parallel {degrees.tp}: DeepSpeed's AutoTP loses adapters and trains frozen layers"
        return Problem(
            kind="tensor-parallel-part", message=message, hint="use --tensor-parallel 1", where="--tensor-parallel"
        )
    if degrees.ep > 1 and (problem := _experts_problem(degrees, profile, cluster)):
        return problem
    for single in degrees.alone():
        problem = (
            _pipeline_problem(single.pp, profile, pipeline_parts(1, schedule))
            if single.pp > 1
            else _heads_problem(single, degrees, profile, cluster)
        )
        if problem:
            return problem
    return _stages_problem(degrees, profile, schedule) if degrees.ep > 1 and degrees.pp > 1 else None


def ranks_problem(degrees: Degrees, ranks: int) -> Problem | None:
    """Return the problem of degrees whose product does not divide the ranks, else None."""
    if ranks % degrees.product == 0:
        return None
    message = " x ".join(f"{name} {degree}" for name, degree in map(_named, degrees.alone()))
    message, hint = f"{message} does not divide {ranks} ranks", f"use a multiple of {degrees.product} ranks"
    if degrees.combined:  # no single degree is wrong
        return Problem(kind="degree-ranks", message=message, hint=hint, where="--gpus, --nodes")
    hint += f", or a degree that divides {ranks}"
    return Problem(kind="degree-ranks", message=message, hint=hint, where=_named(degrees)[0])


def _experts_problem(degrees: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    """Check expert parallelism by the rules of config/validate.py."""
    name, ranks = f"--expert-parallel {degrees.ep}", cluster.ranks // degrees.product * degrees.sp
    if degrees.tp > 1:
        message = f"{name} with --tensor-parallel gives different results than one process"
        hint = "use --tensor-parallel 1"
        return Problem(kind="expert-parallel-beside", message=message, hint=hint, where="--tensor-parallel")
    if profile.model_type not in EXPERT_TYPES or profile.experts is None or profile.trained < profile.parameters:
        what = "a part of" if profile.trained < profile.parameters else "experts of"
        message = f"{name}: zerofit does not support DeepSpeed's AutoEP for {what} {profile.model}"
        return Problem(
            kind="expert-parallel-model", message=message, hint=f"supported model types: {', '.join(EXPERT_TYPES)}"
        )
    for count, what in ((profile.experts, "experts of a layer"), (ranks, "data and sequence parallel ranks")):
        if count % degrees.ep:
            fitting = [d for d in divisors(profile.experts) if ranks % d == 0]
            message, hint = f"{name} does not divide the {count} {what}", f"possible degrees: {_list(fitting)}"
            return Problem(kind="expert-parallel-degree", message=message, hint=hint, where="--expert-parallel")
    return None


def _stages_problem(degrees: Degrees, profile: Profile, schedule: PipelineSchedule) -> Problem | None:
    """Check that each pipeline stage has experts, as train/pipeline.py does."""
    costs = next((costs for key, costs in profile.costs.items() if key.endswith(f"/ep={degrees.ep}")), None)
    if costs is None:
        return None
    every = [bool(cost.experts) for layer, cost in zip(profile.layers, costs, strict=True) for _ in range(layer.count)]
    bounds = stage_bounds(profile, pipeline_parts(degrees.pp, schedule))
    with_experts = [any(every[first:last]) for first, last in bounds]
    for stage in range(degrees.pp):
        if not any(with_experts[part] for part in parts_of_stage(stage, degrees.pp, schedule)):
            message = f"stage {stage} of --pipeline {degrees.pp} has no layer with experts to spread"
            hint = "use fewer stages, or --expert-parallel 1"
            return Problem(kind="expert-parallel-stages", message=message, hint=hint, where="--pipeline")
    return None


def _pipeline_problem(pp: int, profile: Profile, each: int = 1) -> Problem | None:
    layers = sum(layer.count for layer in profile.layers if layer.matrices or layer.vectors)
    if not profile.pipelines:
        message = f"--pipeline {pp} needs a model that can be cut into stages, but {profile.model} cannot"
        return Problem(kind="pipeline-model", message=message, hint="use --pipeline 1", where="--pipeline")
    if each * pp <= layers:
        return None
    some = " that are trained" if profile.trained < profile.parameters else ""
    needed = "as many layers" if each == 1 else f"{each * pp} layers, {each} a stage with --pipeline-schedule dualpipev"
    message = f"--pipeline {pp} needs at least {needed}, but {profile.model} has {layers}{some}"
    hint = f"use {layers // each} or less"
    return Problem(kind="pipeline-layers", message=message, hint=hint, where="--pipeline")


def _heads_problem(degrees: Degrees, combined: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    """Check one degree of a layout. `combined`: all degrees of the layout."""
    name, degree = _named(degrees)
    types = types_of(degrees, combined.combined)
    kind = "tensor-parallel" if degrees.tp > 1 else "sequence-parallel"
    if profile.attention_heads is None or profile.model_type not in types:
        what = "DeepSpeed's AutoTP" if degrees.tp > 1 else "Ulysses attention"
        message = f"{name} {degree}: zerofit does not support {what} for {profile.model_type or profile.model}"
        return Problem(
            kind=f"{kind}-model", message=message, hint=f"supported model types: {', '.join(types)}", where=name
        )
    # sequence ranks divide the heads of a tensor rank
    sharers = combined.tp if degrees.sp > 1 else 1
    heads = profile.attention_heads, profile.kv_heads
    undivided = _undivided(Degrees(tp=degrees.tp * sharers, sp=degrees.sp), heads)
    for count, what, bad in zip(heads, ("attention heads", "key-value heads"), undivided, strict=True):
        if bad:
            hint = f"possible degrees: {_list(_supported_degrees(degrees, profile, sharers))}"
            context = f" with --tensor-parallel {sharers}" if sharers > 1 else ""
            message = f"{name} {degree}{context} does not divide the {count} {what} of {profile.model}"
            return Problem(kind=f"{kind}-heads", message=message, hint=hint, where=name)
    # Each layer waits for several all-reduces of activations, which the network between nodes makes too slow.
    if degrees.tp > 1 and cluster.gpus % degree:
        fitting = [d for d in _supported_degrees(degrees, profile) if cluster.gpus % d == 0]
        message = f"{name} {degree} does not stay within nodes of {cluster.gpus} ranks"
        return Problem(kind="tensor-parallel-node", message=message, hint=f"possible degrees: {_list(fitting)}")
    if degrees.sp > 1 and profile.seq_len and profile.seq_len % degree:
        message = f"{name} {degree} does not divide {profile.seq_len} tokens"
        hint = f"use --seq-len {profile.seq_len // degree * degree or degree}"
        return Problem(kind="sequence-parallel-length", message=message, hint=hint, where=name)
    return None


def _supported_degrees(degrees: Degrees, profile: Profile, sharers: int = 1) -> list[int]:
    """Return the sizes that the model supports for the kind of parallelism in `degrees`.

    A tensor parallel degree must divide the heads. A sequence parallel degree must also divide the tokens.
    `sharers`: number of tensor ranks that divide the heads first.
    """
    heads = profile.attention_heads, profile.kv_heads
    candidates = divisors(max(1, (profile.attention_heads or 1) // sharers))
    if degrees.sp > 1:
        fitting = [d for d in candidates if (profile.seq_len or 0) % d == 0]
        return [d for d in fitting if not any(_undivided(Degrees(tp=sharers, sp=d), heads))]
    return [d for d in candidates if not any(_undivided(Degrees(tp=d), heads))]


def _named(degrees: Degrees) -> tuple[str, int]:
    names = ("--tensor-parallel", "--pipeline", "--sequence-parallel")
    return next((name, degree) for name, degree in zip(names, degrees[:3], strict=True) if degree > 1)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16]))
