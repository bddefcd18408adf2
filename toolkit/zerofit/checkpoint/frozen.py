"""Frozen weights, which are not in checkpoints: a checksum, so other weights are not used by mistake."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.models.checksums import WORD


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """A reference of a checkpoint or of adapters to weights that are stored elsewhere."""

    parameters: int  # elements
    dtype: str  # in training: "float32", "bfloat16" or "float16"
    checksum: str  # of all names and values; independent of the layout


def checksum_text(total: int) -> str:
    """Return the text of a checksum from the sum of all parts."""
    return f"{total % WORD:016x}"
