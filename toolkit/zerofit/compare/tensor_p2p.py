"""Send tensors of any shape between ranks, for hand-written model parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

DIMENSIONS = 8  # maximum


def send(tensor: Tensor, to: int) -> None:
    """Send a float32 tensor, its shape first."""
    # The receiver does not know the shape of the other rank's activations, so a vector of fixed length announces it.
    shape = torch.tensor([*tensor.shape, *[0] * (DIMENSIONS - tensor.dim())], device=tensor.device)
    dist.send(shape, to)
    dist.send(tensor.contiguous(), to)


def receive(source: int, device: torch.device) -> Tensor:
    """Return a tensor received from another rank."""
    shape = torch.zeros(DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(shape, source)
    tensor = torch.empty([size for size in shape.tolist() if size], device=device)
    dist.recv(tensor, source)
    return tensor


def gathered(weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights of all ranks, which have different layers, on rank 0; None elsewhere."""
    parts: list[dict[str, Tensor]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    # Unlike `gather`, gather_object accepts parts of different shapes. It pickles them, which takes no timed step.
    dist.gather_object(weights, parts)
    return {key: value for part in parts for key, value in part.items()} if parts is not None else None
