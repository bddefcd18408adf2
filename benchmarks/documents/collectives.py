"""Show an all-reduce and a scatter between real ranks, with each rank's tensors before and after.

torchrun --standalone --nproc_per_node 2 -m benchmarks.documents.collectives FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofit.spec.files import write_json

ROWS, COLUMNS = 4, 5  # of the matrix that rank 0 scatters


def collectives() -> list[dict[str, Any]]:
    """Return the tensors of every rank of the process group, in the order of the ranks, as nested lists."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.full((1, 2), rank + 1.0)
    seen: dict[str, Any] = {"rank": rank, "before": total.tolist()}
    dist.all_reduce(total)
    matrix = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    part = torch.empty(ROWS // ranks, COLUMNS)
    dist.scatter(part, list(matrix.chunk(ranks)) if rank == 0 else None)
    seen |= {"all_reduced": total.tolist(), "scattered": part.tolist()}
    gathered: list[dict[str, Any]] = [{}] * ranks
    dist.all_gather_object(gathered, seen)
    return gathered


def main(file: Path) -> None:
    """Join the ranks that the launcher has started. Rank 0 writes the tensors of all ranks into `file`."""
    dist.init_process_group("gloo")
    ranks = collectives()
    if dist.get_rank() == 0:
        write_json(file, {"ranks": ranks})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
