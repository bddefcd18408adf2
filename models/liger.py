"""Reproduce the memory of Liger's fused kernels, for traces on fake tensors.

These functions allocate and keep the same tensors as Liger's kernels, and compute no values. Liger itself needs Triton
and a GPU. References are to liger-kernel 0.8.5, below liger_kernel/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Protocol, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerofit.models.autograd import Context
from zerofit.spec.model_facts import LIGER_TYPES

_ROTATE = "apply_rotary_pos_emb"  # the function with which transformers' attention rotates queries and keys
MULTIPROCESSORS = 132  # of an H100; each adds up a float32 gradient of a norm's weight (ops/rms_norm.py)


def use_liger(model: nn.Module) -> None:
    """Make a model's norms, gated MLPs and rotary embeddings allocate like Liger's kernels.

    Models whose type is not in LIGER_TYPES are not changed.
    """
    if getattr(getattr(model, "config", None), "model_type", None) not in LIGER_TYPES:
        return
    for module in model.modules():
        home = sys.modules[type(module).__module__]
        if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
            vars(module)["forward"] = partial(_normalize, module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            vars(module)["forward"] = partial(_gated, cast(_GatedMlp, module))
        elif type(module).__name__.endswith("Attention") and hasattr(home, _ROTATE):
            vars(module)["forward"] = partial(_rotating, home, module.forward)


class _GatedMlp(Protocol):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


def _normalize(module: nn.Module, hidden: Tensor) -> Tensor:
    return _RmsNorm.apply(hidden, module.weight)


def _gated(module: _GatedMlp, hidden: Tensor) -> Tensor:
    return module.down_proj(_GatedProduct.apply(module.gate_proj(hidden), module.up_proj(hidden)))


def _rotating(home: ModuleType, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run an attention's forward so that it rotates queries and keys in place (ops/rope.py)."""
    with patch.object(home, _ROTATE, lambda q, k, *_, **__: _Rotary.apply(q, k)):
        return forward(*args, **kwargs)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm. Saves its input and a float32 number per row, and overwrites the gradient."""

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, weight: Tensor) -> Tensor:
        scales = hidden.new_empty(hidden.numel() // hidden.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scales)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.saved_tensors[1]
        parts = weight.new_empty(MULTIPROCESSORS, len(weight), dtype=torch.float32)
        return gradient, parts.sum(dim=0).to(weight.dtype)


class _GatedProduct(torch.autograd.Function):
    """act(gate) x up. Gradients overwrite both inputs (ops/swiglu.py, ops/geglu.py)."""

    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


class _Rotary(torch.autograd.Function):
    """Rotates queries and keys in place, and their gradients in backward."""

    @staticmethod
    def forward(ctx: Context, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return queries.view_as(queries), keys.view_as(keys)

    @staticmethod
    def backward(ctx: Context, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        # contiguous in (batch, tokens, heads, width)
        return queries.transpose(1, 2).contiguous().transpose(1, 2), keys.transpose(1, 2).contiguous().transpose(1, 2)


def fused_linear_loss(hidden: Tensor, weight: Tensor, labels: Tensor, _: int) -> Tensor:
    """Return a loss from hidden states (..., width), a head (classes, width) and labels (...).

    Only one chunk of the logits exists at a time. A chunk has about as many elements as the hidden states
    (ops/fused_linear_cross_entropy.py).
    """
    return _FusedLinearLoss.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels)


def fused_loss(logits: Tensor, *_: object) -> Tensor:
    """Return a loss from logits. Its gradient overwrites the logits (ops/cross_entropy.py)."""
    return _FusedLoss.apply(logits)


class _LossContext(Context, Protocol):
    gradients: tuple[Tensor, Tensor | None] | None


class _FusedLinearLoss(torch.autograd.Function):
    """A loss whose forward computes the gradients of hidden states and head."""

    @staticmethod
    def forward(ctx: _LossContext, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        (rows, width), classes = hidden.shape, len(weight)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight) if weight.requires_grad else None
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        # As many chunks as classes / width; the buffer has the next power of two of rows.
        chunk = -(-rows // -(-classes // width))
        hidden.new_empty(min(rows, 1 << (chunk - 1).bit_length()), classes)  # logits, and then their gradient
        ctx.gradients = of_hidden, of_weight
        return losses.sum()

    @staticmethod
    def backward(ctx: _LossContext, scale: Tensor) -> tuple[Tensor, Tensor | None, None]:
        assert ctx.gradients is not None  # made by forward
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        return of_hidden, of_weight, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(logits.numel() // logits.shape[-1], dtype=torch.float32).sum()

    @staticmethod
    def backward(ctx: Context, scale: Tensor) -> Tensor:
        return ctx.saved_tensors[0]
