"""Kernels and collectives whose seconds were measured, on this machine or in a trace."""

from __future__ import annotations

from dataclasses import dataclass

# of one element's step on the device, in float32: the gradient scaled (8) and its norm taken (4); by Adam it is read
# (4), master and two moments are read (12) and written (12); SGD adds the decay (12), scales the momentum (8), adds to
# it (12) and steps (12), each an op of its own
UNSTEPPED_BYTES = 12
ADAM_BYTES, SGD_BYTES = UNSTEPPED_BYTES + 28, UNSTEPPED_BYTES + 44


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


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The seconds of one collective between ranks of a node; the bytes are of the whole tensor."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter"
    ranks: int
    size_bytes: float
    seconds: float
