"""Reproduce the memory of Liger's fused kernels, for traces on fake tensors.

These functions allocate and keep the same tensors as Liger's kernels, and compute no values. Liger itself needs Triton
and a GPU. References are to liger-kernel 0.8.5, below liger_kernel/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerofit.spec.model_facts import LIGER_TYPES

MULTIPROCESSORS = 132  # of an H100; each adds up a float32 gradient of a norm's weight (ops/rms_norm.py)


def use_liger(model: nn.Module) -> None:
    """Make a model's norms, gated MLPs and rotary embeddings allocate like Liger's kernels.

    Models whose type is not in LIGER_TYPES are not changed.
    """
    if getattr(getattr(model, "config", None), "model_type", None) not in LIGER_TYPES:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
            vars(module)["forward"] = _norm(module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            vars(module)["forward"] = _gated(module)
        elif type(module).__name__.endswith("Attention") and _rotary_of(module) is not None:
            vars(module)["forward"] = _rotated(module, module.forward)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda hidden: _RmsNorm.apply(hidden, module.weight)


def _gated(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda hidden: module.down_proj(_GatedProduct.apply(module.gate_proj(hidden), module.up_proj(hidden)))


def _rotary_of(module: nn.Module) -> Any:
    """Return the function with which transformers' attention rotates queries and keys; None if it has none."""
    return getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)


def _rotated(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention's forward that rotates queries and keys in place (ops/rope.py)."""
    home = sys.modules[type(module).__module__]

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(home, "apply_rotary_pos_emb", lambda q, k, *_, **__: _Rotary.apply(q, k)):
            return forward(*args, **kwargs)

    return run


class _RmsNorm(torch.autograd.Function):
    """RMSNorm. Saves its input and a float32 number per row. In backward, the gradient is overwritten in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        scales = hidden.new_empty(hidden.numel() // hidden.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scales)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.saved_tensors[1]
        parts = weight.new_empty(MULTIPROCESSORS, len(weight), dtype=torch.float32)
        return gradient, parts.sum(dim=0).to(weight.dtype)


class _GatedProduct(torch.autograd.Function):
    """act(gate) x up. Saves both inputs, and their gradients overwrite them (ops/swiglu.py, ops/geglu.py)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


class _Rotary(torch.autograd.Function):
    """Rotates queries and keys in place, and their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return queries.view_as(queries), keys.view_as(keys)

    @staticmethod
    def backward(ctx: Any, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        # contiguous in (batch, tokens, heads, width)
        return queries.transpose(1, 2).contiguous().transpose(1, 2), keys.transpose(1, 2).contiguous().transpose(1, 2)


def fused_linear_loss(hidden: Tensor, weight: Tensor, labels: Tensor, _: int) -> Tensor:
    """Return a loss from hidden states (..., width), a head (classes, width) and labels (...).

    Only one chunk of the logits exists at a time. A chunk has about as many elements as the hidden states
    (ops/fused_linear_cross_entropy.py).
    """
    return _FusedLinearLoss.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels)


def fused_loss(logits: Tensor, *_: Any) -> Tensor:
    """Return a loss from logits. Its gradient overwrites the logits (ops/cross_entropy.py)."""
    return _FusedLoss.apply(logits)


class _FusedLinearLoss(torch.autograd.Function):
    """A loss whose forward computes the gradients of hidden states and head, each in its own dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        (rows, width), classes = hidden.shape, len(weight)
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight) if weight.requires_grad else None
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        chunk = -(-rows // -(-classes // width))
        hidden.new_empty(min(rows, 1 << (chunk - 1).bit_length()), classes)  # logits, and then their gradient
        ctx.gradients = of_hidden, of_weight
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        return of_hidden, of_weight, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(logits.numel() // logits.shape[-1], dtype=torch.float32).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Tensor:
        return ctx.saved_tensors[0]
