"""The mesh of ranks: which rank of a layout is where, and which ranks share an axis. Nothing else counts ranks.

Axes from the outermost to the innermost: pipeline stages, data, sequence, tensor. Tensor ranks, which exchange most,
are neighbours, so that a node holds them; and data x sequence is one axis between stages and tensor ranks, which is
how DeepSpeed lays out a pipeline (`PipeModelDataParallelTopology`: pipe, data, model). With one of tensor and sequence
parallelism alone this is also what DeepSpeed's own groups do (utils/groups.py `_init_tp_mesh_device`, sequence
parallel state). The trainers check it when they start.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from zerofit.spec.run_folder import Layout

AXES = ("pp", "dp", "sp", "tp")  # fields of Layout, outermost first
WORDS = {"pp": "stage", "dp": "data", "sp": "sequence", "tp": "tensor"}


@dataclass(frozen=True, kw_only=True)
class RankCoords:
    """Coordinates of a rank."""

    rank: int
    pp_rank: int
    dp_rank: int
    sp_rank: int
    tp_rank: int


def coords_of(rank: int, layout: Layout) -> RankCoords:
    """Return the coordinates of a rank."""
    found, rest = {}, rank
    for axis in reversed(AXES):
        rest, found[f"{axis}_rank"] = divmod(rest, getattr(layout, axis))
    return RankCoords(rank=rank, **found)


def ranks_along(layout: Layout, *axes: str) -> list[list[int]]:
    """Return the groups of ranks that differ in these axes alone, each group in order; together they are all ranks."""
    others = [axis for axis in AXES if axis not in axes]
    inside = [_rank(layout, dict(zip(axes, at, strict=True))) for at in _places(layout, axes)]
    starts = [_rank(layout, dict(zip(others, at, strict=True))) for at in _places(layout, others)]
    return [sorted(start + step for step in inside) for start in starts]


def first_of_stages(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline stage."""
    return ranks_along(layout, "pp")[0]


def describe_rank(rank: int, layout: Layout) -> str:
    """Return where a rank is, along the axes that are divided: `stage 1, data 0, tensor 3`; "" where none is."""
    coords = coords_of(rank, layout)
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    return ", ".join(f"{WORDS[axis]} {getattr(coords, f'{axis}_rank')}" for axis in used)


def _places(layout: Layout, axes: tuple[str, ...] | list[str]) -> product:
    return product(*(range(getattr(layout, axis)) for axis in axes))


def _rank(layout: Layout, at: dict[str, int]) -> int:
    strides = {axis: prod(getattr(layout, inner) for inner in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    return sum(strides[axis] * index for axis, index in at.items())
