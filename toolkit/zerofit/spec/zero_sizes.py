"""Sizes of buckets, prefetch and persistence that follow from the model; elements, not bytes."""

from __future__ import annotations

import math

BUCKET_LIMIT = 50_000_000  # elements: enough for a link's full bandwidth, 100 MB in bf16


def bucket_elements(parameters: int) -> int:
    """The model's, at most BUCKET_LIMIT; even.

    DeepSpeed allocates the bucket whole, reduces larger parameters by themselves, and asserts an even size
    (runtime/zero/stage_1_and_2.py:3266, :1409, :390).
    """
    size = min(parameters, BUCKET_LIMIT)
    return size + size % 2


def prefetch_elements(hidden_size: int) -> int:
    """About one weight matrix ahead (as transformers chooses it)."""
    return int(0.9 * hidden_size**2)


def persistence_elements(hidden_size: int) -> int:
    """Norms and biases stay on every rank, matrices are partitioned (as transformers chooses it)."""
    return 10 * hidden_size


def width(hidden_size: int | None, largest_parameter: int) -> int:
    """The residual stream's width; for models without one the square root of the largest parameter."""
    return hidden_size or math.isqrt(largest_parameter)
