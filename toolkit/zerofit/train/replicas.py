"""What data parallel ranks must have alike, and DeepSpeed does not see to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofit.models.batch_norm import batch_norms
from zerofit.spec.errors import Problem, RunFailed
from zerofit.train.trainer import EngineTrainer


@torch.no_grad()
def average_batch_statistics(model: nn.Module, group: Any) -> None:
    """Give all ranks of a data parallel group the mean of batch norm's running means and variances.

    Each rank's statistics come from its own micro batches, and DeepSpeed leaves them different. The mean over ranks is
    what evaluation and the saved model use; training does not read them.
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


def check_replicas(trainer: EngineTrainer) -> None:
    """Raise RunFailed unless every parameter has the same float64 sum on all data parallel ranks.

    They step on the same gradients, so a difference means that a collective or a device has failed them. ZeRO-3 ranks
    hold no replicas.
    """
    if trainer.job.layout.zero_stage == 3:
        return
    sums = [p.detach().double().sum() for p in trainer.module.parameters()]
    mine, group = torch.stack(sums), trainer.engine.seq_data_parallel_group
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if not torch.equal(least, most):
        names = [name for name, _ in trainer.module.named_parameters()]
        apart = [name for name, same in zip(names, (least == most).tolist(), strict=True) if not same]
        message = f"ranks have come apart: {len(apart)} of {len(names)} parameters differ, {apart[0]} the first"
        raise RunFailed(Problem(kind="ranks-apart", message=message, hint="look at every rank's log and device"))
