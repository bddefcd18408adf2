"""FLOPs of an op on tensors that hold nothing: torch's own counter, and what it does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Multiply-adds times two of one call of an op; 0 where it has no products."""
    count = _MORE.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention; torch's counter does not know the CPU's kernel. Nothing is taken off for a causal mask."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the (tokens, k) by (experts, k, n) product of a mixture of experts."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


_MORE = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    torch.ops.aten._grouped_mm: _grouped,
}
