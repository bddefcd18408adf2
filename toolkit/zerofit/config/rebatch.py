"""The same global batch on another number of ranks."""

from __future__ import annotations

from zerofit.spec.layout import Batch


def regroup(batch: Batch, inner: int, ranks: int) -> tuple[int, Batch] | None:
    """How many of `ranks` ranks to take, and the batch on them: as many as the global batch can be shared between.

    `inner`: tensor x pipeline x sequence degree, which stays. The micro batch does not grow, since memory was planned
    for it; accumulation makes up for the rest. None where not even one data parallel rank is left.
    """
    for dp in range(ranks // inner, 0, -1):
        if batch.total % dp == 0:
            share = batch.total // dp
            micro = max(m for m in range(1, min(batch.micro, share) + 1) if share % m == 0)
            return dp * inner, Batch(micro=micro, accumulation=share // micro, dp=dp)
    return None


def shown(batch: Batch) -> str:
    """`3 data parallel ranks x micro batch 4 x 2 accumulation steps = 24 samples a step`."""
    parts = f"{batch.dp} data parallel ranks x micro batch {batch.micro} x {batch.accumulation} accumulation steps"
    return f"{parts} = {batch.total} samples a step"
