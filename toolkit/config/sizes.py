"""Sizes that follow from the model: buckets, prefetch, persistence, swap buffers, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerofit.spec.facts import ModelFacts

BUCKET_LIMIT = 50_000_000  # elements: enough for a link's full bandwidth, 100 MB in bf16


@dataclass(frozen=True)
class Size:
    """How one size is chosen; elements, not bytes."""

    of: Callable[[ModelFacts], int]
    why: str


def bucket(facts: ModelFacts) -> int:
    """Elements: the model's, at most BUCKET_LIMIT; even.

    DeepSpeed allocates the bucket whole, reduces larger parameters by themselves, and asserts an even size
    (runtime/zero/stage_1_and_2.py:3266, :1409, :390).
    """
    size = min(facts.parameters, BUCKET_LIMIT)
    return size + size % 2


_BUCKET = (
    f"as many elements as the model has, at most {BUCKET_LIMIT:,} (100 MB in 16 bits fill a link): DeepSpeed allocates "
    "it whole, and its own 5e8 are 1 GB"
)
# below zero_optimization
SIZES: dict[str, Size] = {
    "reduce_bucket_size": Size(bucket, _BUCKET),
    "allgather_bucket_size": Size(bucket, _BUCKET),
    "stage3_prefetch_bucket_size": Size(
        lambda facts: int(0.9 * facts.hidden_size**2),
        "0.9 x width squared, about one weight matrix ahead (as transformers chooses it)",
    ),
    "stage3_param_persistence_threshold": Size(
        lambda facts: 10 * facts.hidden_size,
        "10 x width: norms and biases stay on every rank, matrices are partitioned (as transformers chooses it)",
    ),
    "offload_param.buffer_size": Size(
        lambda facts: facts.largest_parameter, "the largest parameter must fit into one swap buffer"
    ),
}
