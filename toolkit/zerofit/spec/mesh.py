"""The mesh of ranks: each rank's coordinates, and the groups of ranks along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

from zerofit.spec.run import PipelineSchedule
from zerofit.spec.run_folder import Batch, Layout

# A rank's number is its coordinates in a number system with a digit for each axis:
#
#   rank = ((stage * dp + data) * sp + sequence) * tp + tensor
#
# Tensor parallel ranks communicate most, so they are neighbors within a node; stages exchange least and are farthest
# apart. Experts are spread over the data x sequence ranks, which have different tokens. DeepSpeed's pipeline has the
# same order (`PipeModelDataParallelTopology`: pipe, data, model), and so do its own groups for tensor or sequence
# parallelism alone (utils/groups.py `_init_tp_mesh_device`, sequence parallel state). The trainers check this when they
# start.
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
    coords, rest = {}, rank
    for axis in reversed(AXES):
        rest, coords[f"{axis}_rank"] = divmod(rest, getattr(layout, axis))
    return RankCoords(rank=rank, **coords)


def ranks_along(layout: Layout, *axes: str) -> list[list[int]]:
    """Return groups of ranks that differ only along `axes`. Each rank is in one group."""
    others = [axis for axis in AXES if axis not in axes]
    offsets = [_rank(layout, dict(zip(axes, at, strict=True))) for at in _coordinates(layout, axes)]
    starts = [_rank(layout, dict(zip(others, at, strict=True))) for at in _coordinates(layout, others)]
    return [sorted(start + offset for offset in offsets) for start in starts]


def expert_ranks(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks that split the experts, and the groups with the same experts."""
    # neighboring ranks of the data and sequence axes split the experts, as in DeepSpeed (utils/groups.py,
    # `_create_expert_and_data_parallel`)
    data = ranks_along(layout, "dp", "sp")
    splitting = [ranks[first : first + layout.ep] for ranks in data for first in range(0, len(ranks), layout.ep)]
    return splitting, [ranks[first :: layout.ep] for ranks in data for first in range(layout.ep)]


def expert_rank(rank: int, layout: Layout) -> int:
    """Return the index of a rank's share of the experts."""
    return next(ranks.index(rank) for ranks in expert_ranks(layout)[0] if rank in ranks)


def first_of_stages(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline stage."""
    return ranks_along(layout, "pp")[0]


def pipeline_parts(stages: int, schedule: PipelineSchedule) -> int:
    """Return the number of parts of a pipeline. As many micro batches fill it."""
    return 2 * stages if schedule == "dualpipev" else stages


def parts_of_stage(stage: int, stages: int, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the indices of a pipeline stage's parts."""
    # In DualPipeV each stage has two parts. Activations go through the stages in order, and then back in reverse order.
    # So the first stage has the first part and the last part (runtime/pipe/dualpipev.py).
    return (stage, 2 * stages - 1 - stage) if schedule == "dualpipev" else (stage,)


def largest_batch_of_stages(layout: Layout, batch: Batch) -> list[int]:
    """Return each pipeline stage's first rank with the largest micro batch."""
    # Unequal micro batches are allowed only with data parallelism alone, so there is one stage.
    return [batch.by_rank.index(max(batch.by_rank))] if batch.by_rank else first_of_stages(layout)


def describe_rank(rank: int, layout: Layout) -> str:
    """Return a rank's coordinates along axes with several ranks: "stage 1, data 0, tensor 3".

    "experts 2" is the third share of the experts.
    """
    experts = [f"experts {expert_rank(rank, layout)}"] if layout.ep > 1 else []
    return ", ".join(filter(None, [_described(rank, layout, AXES), *experts]))


def mesh_table(layout: Layout, most: int = 9) -> list[list[str]]:
    """Return the mesh as a table with a row for each stage and a column for each data rank.

    A cell contains tensor ranks. The first row and column are titles. If there are more than `most` rows or columns,
    the table shows the first ones, "..." and the last one.
    """
    groups, columns = ranks_along(layout, "tp"), layout.dp * layout.sp
    titles = [_described(group[0], layout, ("dp", "sp")) or "ranks" for group in groups[:columns]]
    rows = [["", *titles]]
    for first in range(0, len(groups), columns):
        cells = [str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" for ranks in groups[first:][:columns]]
        rows.append([_described(groups[first][0], layout, ("pp",)), *cells])
    return _shortened([_shortened(row, most, "...") for row in rows], most, ["..."])


def _described(rank: int, layout: Layout, axes: tuple[str, ...]) -> str:
    coords, used = coords_of(rank, layout), [axis for axis in axes if getattr(layout, axis) > 1]
    return ", ".join(f"{WORDS[axis]} {getattr(coords, f'{axis}_rank')}" for axis in used)


def _shortened(items: list[T], most: int, gap: T) -> list[T]:
    """Return a title and at most `most` items. `gap` replaces the middle of a longer list."""
    return items if len(items) <= most + 1 else [*items[:most], gap, items[-1]]


def _coordinates(layout: Layout, axes: Sequence[str]) -> product[tuple[int, ...]]:
    return product(*(range(getattr(layout, axis)) for axis in axes))


def _rank(layout: Layout, at: dict[str, int]) -> int:
    strides = {axis: prod(getattr(layout, inner) for inner in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    return sum(strides[axis] * index for axis, index in at.items())
