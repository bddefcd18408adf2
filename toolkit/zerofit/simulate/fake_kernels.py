"""Kernels of a GPU or CPU where the meta device does something else: attention, masks, dropout, all-to-all.

`as_on` puts everything in place for the time of a trace only; a simulation takes what it needs for good (`patches`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.build import UNCHECKED
from zerofit.models.state_space import mamba_kernels

# transformers looks at the values of positions for packed samples (there are none), and keeps a mask when it believes
# to be traced; without padding (BART makes a mask of ones by itself) it passes none, and attention gets is_causal
MASKING = {
    "find_packed_sequence_indices": lambda position_ids: None,
    "is_tracing": lambda *_, **__: False,
    "fast_all": lambda tensor: True,
}


def document_numbers(position_ids: Tensor) -> Tensor:
    """Number the packed documents, as transformers does, whatever the positions' values.

    Always several, which makes a mask: a sample with one document alone takes less. (find_packed_sequence_indices)
    """
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


PACKED_MASKING = {**MASKING, "find_packed_sequence_indices": document_numbers}
# padded samples: as if each batch had a shorter one, which makes a mask; whole ones take less
PADDED_MASKING = {
    **MASKING,
    "fast_all": lambda tensor: False,
    "_ignore_bidirectional_mask_sdpa": lambda padding_mask, kv_length, local_attention_size=None: (
        padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)
    ),
}
FLASH_WIDTH = 256  # of a head at most (check_head_dim_size_flash)
_math_attention = functional.scaled_dot_product_attention


@contextmanager
def as_on(device: str, sp: int = 1, packed: bool = False, padded: bool = False) -> Iterator[None]:
    """Take the kernels of a kind of device, "cpu" or "cuda"; with sp > 1 attention runs behind Ulysses' all-to-all.

    `packed`: samples hold documents that must not see each other. `padded`: some end early.
    """
    attention: Callable[..., Tensor] = partial(_fused_attention, device)
    if sp > 1:
        attention = _ulysses(attention, sp)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, UNCHECKED))
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attention))
        if device == "cuda":
            stack.enter_context(patch.object(functional, "dropout", _cuda_dropout))
            stack.enter_context(mamba_kernels())
        masking_utils = sys.modules.get("transformers.masking_utils")  # a CNN's trace must not import transformers
        for name, stand_in in (PACKED_MASKING if packed else PADDED_MASKING if padded else MASKING).items():
            if hasattr(masking_utils, name):
                stack.enter_context(patch.object(masking_utils, name, stand_in))
        yield


def _fused_attention(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that a device takes (ATen's sdp_utils.cpp).

    Kernels keep nothing of length squared. Where there is none, torch computes the whole matrix of scores: on "cpu"
    with dropout, a mask that is learnt (Swin's) or for values of another width than queries, on "cuda" (and on "cpu"
    before torch has it there) for keys of one head that queries of many share by broadcasting (Falcon). On "cuda" the
    kernel is flash attention; in float32, with a mask, for values of another width (multi-head latent attention) or
    heads above FLASH_WIDTH, which it has not, the memory efficient one, for which keys and values are repeated for
    every query head.
    """
    narrow = query.shape[-1] == value.shape[-1]
    learnt = attn_mask is not None and attn_mask.requires_grad
    whole = dropout_p > 0.0 or learnt or query.dim() != 4 or not narrow or _too_few_keys(query, key, enable_gqa)
    if device == "cpu" and whole:
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if device == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    if query.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and query.dtype != torch.float32 and narrow and query.shape[-1] <= FLASH_WIDTH:
        op = torch.ops.aten._scaled_dot_product_flash_attention
        return op(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]


def _too_few_keys(query: Tensor, key: Tensor, enable_gqa: bool) -> bool:
    return key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa and not _cpu_shares_keys()


@cache
def _cpu_shares_keys() -> bool:
    """Return whether the installed torch's kernel for CPUs broadcasts keys of one head (torch 2.11's does not)."""
    choice: Any = vars(torch)["_fused_sdp_choice"]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        query, key = (torch.zeros(1, heads, 4, 8, device="cpu") for heads in (2, 1))
        return choice(query, key, key) != 0  # that is attention made of plain products


cuda_attention = partial(_fused_attention, "cuda")


def _cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run a GPU's fused dropout, which keeps a mask of one byte an element (torch's native_dropout)."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0.0 else input


def _ulysses(attention: Callable[..., Tensor], sp: int) -> Callable[..., Tensor]:
    """Let attention see the whole sequence and 1/sp of the heads (deepspeed/runtime/sequence_parallel/ulysses_sp.py).

    Inputs are (batch, heads, length / sp, head_dim), so is the output.
    """

    def behind_all_to_all(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.shape[1] % sp:  # each key and value head is repeated for sp / heads ranks
            key = key.repeat_interleave(sp // key.shape[1], dim=1)
            value = value.repeat_interleave(sp // value.shape[1], dim=1)
        out = attention(*(_gather(t, sp) for t in (query, key, value)), *args, **kwargs)
        batch, heads, length, dim = out.shape
        sent = out.permute(2, 0, 1, 3).reshape(sp, length // sp, batch, heads * dim).contiguous()
        back = _AllToAll.apply(sent).permute(1, 2, 0, 3).reshape(length // sp, batch, sp * heads * dim).contiguous()
        return back.reshape(length // sp, batch, sp * heads, dim).permute(1, 2, 0, 3)

    return behind_all_to_all


def _gather(x: Tensor, sp: int) -> Tensor:
    """Turn (batch, heads, length / sp, dim) to (batch, heads / sp, length, dim)."""
    batch, heads, length, dim = x.shape
    sent = x.permute(2, 0, 1, 3).reshape(length, batch, sp, heads // sp, dim)
    received = _AllToAll.apply(sent.permute(2, 0, 1, 3, 4).contiguous())
    return received.reshape(sp * length, batch, heads // sp, dim).permute(1, 2, 0, 3).contiguous()


class _AllToAll(torch.autograd.Function):
    """Receives into a new buffer of the same shape, forward and backward."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        return torch.empty_like(sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad.contiguous())
