"""Batch norm's running statistics across data parallel ranks, which DeepSpeed leaves different on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofit.models.batch_norm import batch_norms


@torch.no_grad()
def average_batch_statistics(model: nn.Module, group: Any) -> None:
    """Give all ranks of a data parallel group the mean of their running means and variances.

    Each rank's statistics come from its own micro batches. The mean over ranks is what evaluation and the saved model
    use; training does not read them.
    """
    statistics = [
        tensor for norm in batch_norms(model) for tensor in (norm.running_mean, norm.running_var) if tensor is not None
    ]
    if not statistics or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.float().reshape(-1) for t in statistics])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(statistics, flat.split([t.numel() for t in statistics]), strict=True):
        tensor.copy_(mean.view_as(tensor))
