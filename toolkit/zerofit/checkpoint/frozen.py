"""Frozen weights, which checkpoints leave out: what remembers them, so that others are not taken for them."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.models.checksums import WORD


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """The reference that a checkpoint or an adapter's folder has to weights that it does not hold."""

    parameters: int  # elements
    dtype: str  # in which they were used: "float32", "bfloat16" or "float16"
    checksum: str  # of names, places and bits of all of them; the same however they are spread over ranks


def checksum_text(total: int) -> str:
    """Return the sum of all parts as a checksum is written."""
    return f"{total % WORD:016x}"
