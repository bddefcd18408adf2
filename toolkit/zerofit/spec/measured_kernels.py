"""Kernels and collectives whose seconds were measured, on this machine or in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# of one element's step on the device, in float32: master and two moments, 12 read and 12 written; the gradient scaled
# (8), its norm taken (4), read by Adam (4)
ADAM_BYTES, UNSTEPPED_BYTES = 40, 12  # the latter without Adam


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """The seconds of one kernel, of a kind and shape as a profile's `Kernel` has them."""

    kind: str
    dtype: str  # as torch names it: "bfloat16"
    seconds: float
    shape: tuple[int, ...] = ()
    flops: float = 0.0  # of attention without what a causal mask spares
    moved_bytes: float = 0.0
    groups: int = 1
    causal: bool = False

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> MeasuredKernel:
        """Return the kernel that `asdict` gave. TypeError where it is another thing."""
        return cls(**{**value, "shape": tuple(value.get("shape", ()))})


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The seconds of one collective between ranks of a node; the bytes are of the whole tensor."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter"
    ranks: int
    size_bytes: float
    seconds: float
