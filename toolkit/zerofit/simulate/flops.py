"""FLOPs of an op on tensors that hold nothing: torch's own counter, and what it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Multiply-adds times two of one call of an op; 0 where it has no products."""
    count = _MORE.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=out) if count else 0


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention; nothing is taken off for a causal mask."""
    return sdpa_flop_count(query.shape, *_ungrouped(query, key, value))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, *_ungrouped(query, key, value))


def _ungrouped(query: Tensor, *grouped: Tensor) -> list[tuple[int, ...]]:
    """Shapes of keys and values with a head for each head of the queries: torch 2.11's counter knows no groups."""
    return [(len(one), query.shape[1], *one.shape[2:]) for one in grouped]


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the (tokens, k) by (experts, k, n) product of a mixture of experts."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


_MORE: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: _grouped}
for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _MORE[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _attention
    _MORE[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _attention_backward
