"""A model whose layers lie on different ranks, put together again."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gathered(mine: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """All ranks' weights on rank 0, None elsewhere."""
    parts: list[dict[str, Tensor]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts)
    return {key: value for part in parts for key, value in part.items()} if parts is not None else None
