"""Share the statistics of batch norms of any dimension among all data parallel ranks.

torch.nn.SyncBatchNorm only has kernels for accelerators and works neither on CPUs nor in the simulation. Here ranks
exchange their means and variances: forward needs an all-gather, backward an all-reduce. Then torch's batch norm kernel
normalizes with the shared mean and variance.
"""

from __future__ import annotations

import types
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from zerofit.models.autograd import Context

__all__ = ["BatchNorm", "batch_norms", "synchronize_batch_norms"]


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the model's batch norms."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def synchronize_batch_norms(model: nn.Module) -> None:
    """Make all batch norms of a model use the statistics of all ranks during training.

    Statistics are float32 for any input dtype. The model is changed in place, and its names stay the same.
    """

    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
        out, mean, var, count = _Synchronized.apply(x, weight, bias, self.eps)
        if self.training and self.running_mean is not None:
            _update_running(self, mean, var, count)
        return out

    for norm in batch_norms(model):
        norm.forward = types.MethodType(forward, norm)


@torch.no_grad()
def _update_running(norm: BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update the running statistics with a batch. Like torch, use the unbiased variance."""
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(norm.num_batches_tracked)
    assert norm.running_mean is not None and norm.running_var is not None and momentum is not None
    norm.running_mean.lerp_(mean, momentum)
    norm.running_var.lerp_(var * (count / (count - 1).clamp_min(1)), momentum)


class _SharedContext(Context, Protocol):
    biased: bool


# Statistics of all ranks, from n_r values with mean_r and var_r on rank r (Chan et al., 1979):
#
#     mean = sum(n_r * mean_r) / n
#     var  = sum(n_r * (var_r + (mean_r - mean)^2)) / n
#
# The gradient, with x' = (x - mean) / std and means over all ranks' values of a channel:
#
#     dx = weight / std * (dy - mean(dy) - x' * mean(dy * x'))
class _Synchronized(torch.autograd.Function):
    """Batch norm with all ranks' statistics. Saves the input and 3 numbers per channel."""

    @staticmethod
    def forward(
        ctx: _SharedContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _shared_statistics(x)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), count)
        ctx.biased = bias is not None
        out = functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, var, count)
        return out, mean, var, count

    @staticmethod
    def backward(
        ctx: _SharedContext, gradient: Tensor, *_: object
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        over, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
        slopes, centered = gradient.float(), x.float() - mean.view(shape)
        sums = torch.stack([slopes.sum(over), (slopes * centered).sum(over)])
        # the gradients of weight and bias are this rank's, since the engine adds up those of all ranks
        of_weight = None if weight is None else sums[1] * inverse
        of_bias = sums[0].clone() if ctx.biased else None
        if _ranks() > 1:
            dist.all_reduce(sums)
        sums /= count
        scale = inverse if weight is None else inverse * weight
        correlation = (sums[1] * inverse.square()).view(shape)
        of_x = (slopes - sums[0].view(shape) - centered * correlation) * scale.view(shape)
        return of_x.to(x.dtype), of_weight, of_bias, None


def _shared_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel over all ranks, float32."""
    over = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.float(), over, correction=0)
    count = mean.new_full((1,), x.numel() // x.shape[1])
    if (ranks := _ranks()) == 1:
        return mean, var, count
    # one collective for all three, since each costs a round of latency
    local = torch.cat([mean, var, count])
    gathered = local.new_empty(ranks * len(local))
    dist.all_gather_into_tensor(gathered, local)
    means, variances, counts = gathered.view(ranks, -1).split([len(mean), len(var), 1], dim=1)
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, var, count


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
