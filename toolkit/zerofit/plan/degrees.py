"""Parallel degrees: which of them a model and a cluster take, and why others cannot be."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.profile import Profile
from zerofit.spec.support import SEQUENCE_PARALLEL_TYPES, TENSOR_PARALLEL_TYPES


class Degrees(NamedTuple):
    """Parallel degrees beside data parallelism; at most one is above 1."""

    tp: int = 1
    pp: int = 1
    sp: int = 1

    @property
    def product(self) -> int:
        """Ranks that hold one copy of the batch's share."""
        return self.tp * self.pp * self.sp


def settings_of(heads: tuple[int | None, int | None], model_type: str | None, most: int) -> list[Degrees]:
    """The degrees up to `most` that are worth tracing for a model of these attention and key-value heads."""
    powers = [2**n for n in range(1, most.bit_length()) if 2**n <= most]
    found = [degrees for n in powers for degrees in (Degrees(tp=n), Degrees(sp=n))]
    return [Degrees(), *(degrees for degrees in found if heads_take(degrees, heads, model_type))]


def heads_take(degrees: Degrees, heads: tuple[int | None, int | None], model_type: str | None) -> bool:
    """Whether tensor and sequence parallelism can divide a model of these attention and key-value heads so."""
    degree, whole = degrees.tp * degrees.sp, [count for count in heads if count]
    types = TENSOR_PARALLEL_TYPES if degrees.tp > 1 else SEQUENCE_PARALLEL_TYPES
    return degree == 1 or (bool(whole) and model_type in types and not any(count % degree for count in whole))


def degree_problem(degrees: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    """Why these degrees cannot be on this model and cluster, if so."""
    if sum(degree > 1 for degree in degrees) > 1:
        return Problem(
            kind="combination",
            message="tensor, pipeline and sequence parallelism cannot be combined: DeepSpeed builds the process "
            "groups of only one of them",
            hint="keep one; data parallelism fills the remaining ranks",
            where="--tensor-parallel, --pipeline, --sequence-parallel",
        )
    if cluster.ranks % degrees.product:
        name, degree = _named(degrees)
        fitting = [d for d in divisors(cluster.ranks) if d > 1 and _model_takes(degrees, d, profile)] or [1]
        hint = f"degrees that do: {_list(fitting)}"
        return Problem(
            kind="degree-ranks", message=f"{name} {degree} does not divide {cluster.ranks} ranks", hint=hint, where=name
        )
    if degrees.pp > 1:
        return _pipeline_problem(degrees.pp, profile)
    if degrees.tp > 1 or degrees.sp > 1:
        return _heads_problem(degrees, profile, cluster)
    return None


def _pipeline_problem(pp: int, profile: Profile) -> Problem | None:
    layers = sum(layer.count for layer in profile.layers)
    if ":" in profile.model:
        message = f"--pipeline {pp} needs a model that is a list of layers, which {profile.model} is not"
        return Problem(kind="pipeline-model", message=message, hint="leave it at 1", where="--pipeline")
    if pp <= layers:
        return None
    message = f"--pipeline {pp} needs at least as many layers, and {profile.model} has {layers}"
    return Problem(kind="pipeline-layers", message=message, hint=f"take {layers} or less", where="--pipeline")


def _heads_problem(degrees: Degrees, profile: Profile, cluster: Cluster) -> Problem | None:
    name, degree = _named(degrees)
    types = TENSOR_PARALLEL_TYPES if degrees.tp > 1 else SEQUENCE_PARALLEL_TYPES
    kind = "tensor-parallel" if degrees.tp > 1 else "sequence-parallel"
    if profile.attention_heads is None or profile.model_type not in types:
        what = "AutoTP is not known to split" if degrees.tp > 1 else "Ulysses attention does not fit"
        message = f"{name} {degree}: DeepSpeed's {what} {profile.model_type or profile.model}"
        return Problem(kind=f"{kind}-model", message=message, hint=f"model types: {', '.join(types)}", where=name)
    for count, what in ((profile.attention_heads, "attention heads"), (profile.kv_heads, "key-value heads")):
        if count and count % degree:
            hint = f"degrees that do: {_list(_taken(degrees, profile))}"
            message = f"{name} {degree} does not divide the {count} {what} of {profile.model}"
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
    """Whether the model takes another degree of the same kind."""
    if degrees.pp > 1:
        return _pipeline_problem(degree, profile) is None
    other = Degrees(tp=degree) if degrees.tp > 1 else Degrees(sp=degree)
    return heads_take(other, (profile.attention_heads, profile.kv_heads), profile.model_type)


def _taken(degrees: Degrees, profile: Profile) -> list[int]:
    """Degrees of this kind that the model takes: they divide its heads, and its tokens in sequence parallelism."""
    counts = [count for count in (profile.attention_heads, profile.kv_heads) if count]
    if degrees.sp > 1 and profile.seq_len:
        counts.append(profile.seq_len)
    return [d for d in divisors(min(counts)) if not any(count % d for count in counts)]


def _named(degrees: Degrees) -> tuple[str, int]:
    names = ("--tensor-parallel", "--pipeline", "--sequence-parallel")
    return next((name, degree) for name, degree in zip(names, degrees, strict=True) if degree > 1)


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16]))
