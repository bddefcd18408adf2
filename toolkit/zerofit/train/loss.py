"""The loss: cross entropy weighted so that every layout averages over the very same targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zerofit.spec.model_facts import IGNORE_INDEX


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | float, chunk: int | None = None) -> Tensor:
    """Return weight x the sum of cross entropies over targets; logits (..., classes), labels (...), in float32.

    With weight = accumulation steps x (data x sequence parallel degree) / targets in the global batch, the engine's
    mean over micro batches and ranks is exactly the mean over all targets, however they are spread. With `chunk`, only
    so many targets' logits are in float32 at a time.
    """
    if chunk is not None:
        return _Chunked.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), chunk) * weight
    flat = logits.reshape(-1, logits.shape[-1]).float()  # (targets, classes)
    if isinstance(weight, float) and weight * labels.numel() == 1:  # no position is ignored: the mean, a kernel less
        return functional.cross_entropy(flat, labels.reshape(-1))
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum") * weight


class _Chunked(torch.autograd.Function):
    """The sum of cross entropies, its gradient made chunk by chunk in forward and kept in the logits' precision.

    Kept beside the logits is one tensor of their size. The plain way keeps their float32 copy and its logarithms of
    probabilities, and makes two more in backward; its gradient is rounded to the logits' precision once less.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:  # (targets, classes), (targets,)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = logits.new_zeros((), dtype=torch.float32)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            log_p = functional.log_softmax(logits[part].float(), dim=-1)
            total += functional.nll_loss(log_p, labels[part], ignore_index=IGNORE_INDEX, reduction="sum")
            if gradient is not None:
                real = (labels[part] != IGNORE_INDEX).unsqueeze(1)
                p = log_p.exp_()
                p.scatter_add_(1, labels[part].clamp_min(0).unsqueeze(1), p.new_full((len(p), 1), -1.0))
                gradient[part] = p.mul_(real)
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scale), None, None


def counts(logits: Tensor, labels: Tensor) -> Tensor:
    """Return float64 (3,): sum of cross entropies, targets, targets whose largest logit is right."""
    flat, labels = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    real = labels != IGNORE_INDEX
    total = functional.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    right = (flat.argmax(-1) == labels) & real
    return torch.stack([total.double(), real.sum().double(), right.sum().double()])
