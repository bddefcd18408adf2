"""Which part of the batch and of the model one rank has."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RankCoords:
    """Coordinates of a rank. Tensor and sequence parallel neighbours are adjacent ranks; pipeline stages are outermost.

    This is how DeepSpeed lays its groups out (utils/groups.py `_init_tp_mesh_device`, sequence parallel state, and
    `PipeDataParallelTopology`), which the trainers check when they start.
    """

    rank: int
    dp_rank: int
    pp_rank: int
    sp_rank: int


def coords_of(rank: int, layout: Layout) -> RankCoords:
    """Return the coordinates of a rank; at most one of tp, pp and sp is above 1."""
    inner = layout.tp * layout.sp
    within_stage = rank % (layout.dp * inner)
    return RankCoords(
        rank=rank,
        dp_rank=within_stage // inner,
        sp_rank=within_stage % layout.sp,
        pp_rank=rank // (layout.dp * inner),
    )
