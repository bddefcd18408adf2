"""The mesh of ranks: which rank of a layout is where, and which ranks share an axis. Nothing else counts ranks.

Axes from the outermost to the innermost: pipeline stages, data, sequence, tensor. Tensor ranks, which exchange most,
are neighbours, so that a node holds them. Experts are spread along data x sequence, whose ranks each have tokens of
their own; and data x sequence is one axis between stages and tensor ranks, which is
how DeepSpeed lays out a pipeline (`PipeModelDataParallelTopology`: pipe, data, model). With one of tensor and sequence
parallelism alone this is also what DeepSpeed's own groups do (utils/groups.py `_init_tp_mesh_device`, sequence
parallel state). The trainers check it when they start.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

from zerofit.spec.run import PipelineSchedule
from zerofit.spec.run_folder import Batch, Layout

AXES = ("pp", "dp", "sp", "tp")  # fields of Layout, outermost first
T = TypeVar("T")
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


def expert_ranks(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks that hold a mixture's experts together, and those that hold the same experts.

    Neighbours of the data x sequence axis hold them together, as in DeepSpeed (utils/groups.py,
    `_create_expert_and_data_parallel`).
    """
    data = ranks_along(layout, "dp", "sp")
    together = [ranks[first : first + layout.ep] for ranks in data for first in range(0, len(ranks), layout.ep)]
    return together, [ranks[first :: layout.ep] for ranks in data for first in range(layout.ep)]


def expert_rank(rank: int, layout: Layout) -> int:
    """Return which share of the experts a rank holds."""
    return next(ranks.index(rank) for ranks in expert_ranks(layout)[0] if rank in ranks)


def first_of_stages(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline stage."""
    return ranks_along(layout, "pp")[0]


def pipeline_parts(stages: int, schedule: PipelineSchedule) -> int:
    """Return into how many parts a pipeline cuts the layers; it takes as many micro batches to fill it."""
    return 2 * stages if schedule == "dualpipev" else stages


def parts_of_stage(stage: int, stages: int, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return which of the parts, in the order of the layers, a pipeline stage holds.

    In DualPipeV two: activations go out through the first half of the parts and back through the second, so that the
    first stage has both ends (runtime/pipe/dualpipev.py).
    """
    return (stage, 2 * stages - 1 - stage) if schedule == "dualpipev" else (stage,)


def heaviest_of_stages(layout: Layout, batch: Batch) -> list[int]:
    """Return a rank of each pipeline stage that takes as many samples as any: the first, but for unequal ranks."""
    if not batch.by_rank or layout.dp < layout.world_size:
        return first_of_stages(layout)
    return [batch.by_rank.index(max(batch.by_rank))]


def describe_rank(rank: int, layout: Layout) -> str:
    """Return where a rank is, along the axes that are divided: `stage 1, data 0, tensor 3`; "" where none is.

    `experts 2`: it holds the third share of them.
    """
    experts = [f"experts {expert_rank(rank, layout)}"] if layout.ep > 1 else []
    return ", ".join(filter(None, [_described(rank, layout, AXES), *experts]))


def mesh_table(layout: Layout, most: int = 9) -> list[list[str]]:
    """Return a picture of the mesh: a row of titles, then one a stage, with the tensor ranks of each data rank.

    Of more than `most` rows or columns the middle is left out.
    """
    groups, wide = ranks_along(layout, "tp"), layout.dp * layout.sp
    titles = [_described(group[0], layout, ("dp", "sp")) or "ranks" for group in groups[:wide]]
    rows = [["", *titles]]
    for first in range(0, len(groups), wide):
        cells = [str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" for ranks in groups[first:][:wide]]
        rows.append([_described(groups[first][0], layout, ("pp",)), *cells])
    return _shortened([_shortened(row, most, "...") for row in rows], most, ["..."])


def _described(rank: int, layout: Layout, axes: tuple[str, ...]) -> str:
    coords, used = coords_of(rank, layout), [axis for axis in axes if getattr(layout, axis) > 1]
    return ", ".join(f"{WORDS[axis]} {getattr(coords, f'{axis}_rank')}" for axis in used)


def _shortened(items: list[T], most: int, gap: T) -> list[T]:
    """Return a title and what comes after it; of more than `most` of these the first and the last."""
    return items if len(items) <= most + 1 else [*items[:most], gap, items[-1]]


def _places(layout: Layout, axes: tuple[str, ...] | list[str]) -> product:
    return product(*(range(getattr(layout, axis)) for axis in axes))


def _rank(layout: Layout, at: dict[str, int]) -> int:
    strides = {axis: prod(getattr(layout, inner) for inner in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    return sum(strides[axis] * index for axis, index in at.items())
