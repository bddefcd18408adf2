"""Sizes that follow from the model: buckets, prefetch, persistence, swap buffers, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.zero_sizes import BUCKET_LIMIT, bucket_elements, persistence_elements, prefetch_elements


@dataclass(frozen=True)
class Size:
    """How one size is chosen; elements, not bytes."""

    of: Callable[[ModelFacts], int]
    why: str


_BUCKET = (
    f"as many elements as the model has, at most {BUCKET_LIMIT:,} (100 MB in 16 bits fill a link): DeepSpeed allocates "
    "it whole, and its own 5e8 are 1 GB"
)
# below zero_optimization
SIZES: dict[str, Size] = {
    "reduce_bucket_size": Size(lambda facts: bucket_elements(facts.parameters), _BUCKET),
    "allgather_bucket_size": Size(lambda facts: bucket_elements(facts.parameters), _BUCKET),
    "stage3_prefetch_bucket_size": Size(
        lambda facts: prefetch_elements(facts.hidden_size),
        "0.9 x width squared, about one weight matrix ahead (as transformers chooses it)",
    ),
    "stage3_param_persistence_threshold": Size(
        lambda facts: persistence_elements(facts.hidden_size),
        "10 x width: norms and biases stay on every rank, matrices are partitioned (as transformers chooses it)",
    ),
    "offload_param.buffer_size": Size(
        lambda facts: facts.largest_parameter, "the largest parameter must fit into one swap buffer"
    ),
}
