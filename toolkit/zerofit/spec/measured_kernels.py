"""Measured times of kernels and collectives, from this machine or a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """The measured time of one kernel, with kind and shape as in a profile's `Kernel`."""

    kind: str
    dtype: str  # as torch names it: "bfloat16"
    seconds: float
    shape: tuple[int, ...] = ()
    flops: float = 0.0  # for causal attention without the masked half
    moved_bytes: float = 0.0
    groups: int = 1
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The measured time of one collective between ranks of a node."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter"
    ranks: int
    size_bytes: float  # of the full tensor
    seconds: float
