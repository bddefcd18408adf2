"""Replace kernels that work differently on the meta device, e.g. attention and dropout.

`as_on` replaces them during a trace. In a simulation, `patches` replaces them for the rest of the process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.build import UNCHECKED, no_value_checks
from zerofit.models.state_space import mamba_kernels


def _sees_all(padding_mask: Tensor | None, kv_length: int, local_attention_size: int | None = None) -> bool:
    return local_attention_size is None or kv_length < local_attention_size


# transformers searches positions for packed samples, which needs values, and keeps masks when it believes it is traced.
# Without padding it passes no mask (BART itself makes a mask of ones), and attention gets is_causal
_MASKING: dict[str, Callable[..., object]] = {
    "_ignore_bidirectional_mask_sdpa": _sees_all,
    "find_packed_sequence_indices": lambda position_ids: None,
    "is_tracing": lambda *_, **__: False,
    "fast_all": lambda tensor: True,
}


def document_numbers(position_ids: Tensor) -> Tensor:
    """Number the packed documents as transformers does, assuming several in each sample.

    If each sample has one document, transformers makes no mask and needs less memory.
    (find_packed_sequence_indices)
    """
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


_PACKED_MASKING = {**_MASKING, "find_packed_sequence_indices": document_numbers}
# padded samples: assume a shorter sample in each batch, so there is a mask; full samples need less memory
_PADDED_MASKING = {
    **_MASKING,
    "fast_all": lambda tensor: False,
    "_ignore_bidirectional_mask_sdpa": lambda padding_mask, *lengths, **more: (
        padding_mask is None and _sees_all(padding_mask, *lengths, **more)
    ),
}


def masking(packed: bool = False, padded: bool = False) -> dict[str, Callable[..., object]]:
    """Return replacements for functions of transformers.masking_utils.

    `packed`: whether samples have several documents. `padded`: whether samples may end early.
    """
    return _PACKED_MASKING if packed else _PADDED_MASKING if padded else _MASKING


FLASH_WIDTH = 256  # maximum width of a head (check_head_dim_size_flash)
_math_attention = functional.scaled_dot_product_attention


@contextmanager
def as_on(device: str, sp: int = 1, packed: bool = False, padded: bool = False) -> Iterator[None]:
    """Within this context, meta tensors use the kernels of `device` ("cpu" or "cuda").

    With `sp` > 1, attention is Ulysses'. `packed`: whether samples have several documents, separated by a mask.
    `padded`: whether some samples end early.
    """
    attention: Callable[..., Tensor] = partial(_fused_attention, device)
    if sp > 1:
        attention = _ulysses(attention, sp)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, UNCHECKED))
        stack.enter_context(no_value_checks())
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attention))
        if device == "cuda":
            stack.callback(fused_norms("Meta")._destroy)
            stack.enter_context(patch.object(functional, "dropout", _cuda_dropout))
            stack.enter_context(mamba_kernels())
        masking_utils = sys.modules.get("transformers.masking_utils")  # a CNN's trace must not import transformers
        for name, stand_in in masking(packed, padded).items():
            if hasattr(masking_utils, name):
                stack.enter_context(patch.object(masking_utils, name, stand_in))
        yield


def fused_norms(*keys: str) -> Library:
    """Register CUDA's fused RMSNorm for `keys` until the returned library is destroyed.

    Without this kernel, torch computes the norm by other ops, which store float32 copies (layer_norm.cpp,
    rms_norm).
    """
    library = Library("aten", "IMPL")
    assert library.m is not None
    for key in keys:  # `library.impl` refuses a Meta kernel for an op that torch can decompose
        library.m.impl("_fused_rms_norm", key, _fused_rms_norm, False)
    return library


def _fused_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the normalized input, and the float32 factor of each row.

    See cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda.
    """
    last = tuple(range(-len(normalized_shape), 0))
    lifted = input.to(torch.promote_types(input.dtype, torch.float32))
    added = torch.finfo(lifted.dtype).eps if eps is None else eps
    factor = torch.rsqrt(lifted.square().mean(last, keepdim=True) + added)
    if input.is_meta:
        return torch.empty_like(input, memory_format=torch.contiguous_format), factor
    normed = lifted * factor
    return (normed if weight is None else normed * weight).to(input.dtype), factor


# Kernels of scaled_dot_product_attention, as torch chooses them (sdp_utils.cpp):
#
#   device   condition                                                       kernel
#   cpu      dropout, a learned mask, values of another width                 plain matmuls (all scores)
#   cpu      otherwise                                                       flash for the CPU
#   cuda     16 bits, no mask, heads up to FLASH_WIDTH, equal widths         flash
#   cuda     otherwise, widths that are multiples of 16 bytes                memory-efficient
#   cuda     otherwise, e.g. three dimensions or float64                     plain matmuls
#
# What torch prepares before the kernel (attention.cpp, scaled_dot_product_attention) is saved for backward in each
# layer, even if all layers share one mask:
#
#   a bool mask      becomes a mask in the queries' dtype
#   flash            heads of another width are padded to a multiple of 8 elements
#   memory-efficient a mask whose rows do not begin at multiples of 8 elements is padded
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
    """Run the attention kernel that torch would choose on `device` (ATen's sdp_utils.cpp).

    Fused kernels store no matrix of scores. If no fused kernel applies, torch computes the full matrix. On "cpu" there
    is one fused kernel. It does not apply with dropout, with a learned mask (Swin), or if values are not as wide as
    queries. On "cuda" there are two (`_cuda_kernel`). The memory-efficient kernel needs a head of keys and values for
    each head of queries: `enable_gqa` repeats them, and a single head is expanded.
    """
    learned = attn_mask is not None and attn_mask.requires_grad
    shared = key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa
    unfused = dropout_p > 0.0 or learned or query.dim() != 4 or query.shape[-1] != value.shape[-1]
    if device == "cpu" and (unfused or (shared and not _broadcasts_keys())):
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
        hidden = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, hidden)
    if device == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    kernel = _cuda_kernel(query, key, value, attn_mask, is_causal, enable_gqa)
    if kernel == "math":
        plain, more = torch.ops.aten._scaled_dot_product_attention_math, {"scale": scale, "enable_gqa": enable_gqa}
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **more)[0]
    if kernel == "flash":
        op, width = torch.ops.aten._scaled_dot_product_flash_attention, query.shape[-1]
        padded = (t if width % 8 == 0 else functional.pad(t, (0, -width % 8)) for t in (query, key, value))
        out = op(*padded, dropout_p, is_causal, scale=scale)[0]
        return out if width % 8 == 0 else out[..., :width]
    if attn_mask is not None:  # preprocess_mask
        if attn_mask.stride(-1) != 1 or any(stride % 8 for stride in attn_mask.stride()[:-1]):
            width = attn_mask.shape[-1]
            attn_mask = functional.pad(attn_mask, (0, 8 - width % 8))[..., :width]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    if enable_gqa:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    elif shared:
        key, value = (t.expand(-1, query.shape[1], -1, -1) for t in (key, value))
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str:
    """Return the kernel that torch chooses on a GPU: "flash", "efficient" or "math".

    A script can disable kernels (torch.nn.attention.sdpa_kernel). If no enabled kernel applies, RuntimeError is raised,
    as in torch. cuDNN's kernels need as much memory as the others.
    """
    enabled, width, half = torch.backends.cuda, query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    # check_prefer_cudnn_attention: cuDNN's kernels come first on Hopper and Blackwell, and after "math" on other GPUs
    cudnn = half and enabled.cudnn_sdp_enabled()
    cudnn = cudnn and (not enabled.math_sdp_enabled() or _is_hopper_or_blackwell())
    fused = query.dim() == key.dim() == value.dim() == 4 and len(query) == len(key) == len(value)
    fused = fused and query.dtype == key.dtype == value.dtype
    if fused and not enable_gqa and query.shape[1] != key.shape[1]:
        fused = key.shape[1] == value.shape[1] == 1 and _broadcasts_keys()
    flash = fused and half and mask is None and width == value.shape[-1] <= FLASH_WIDTH
    flash = flash and (not is_causal or query.shape[-2] == key.shape[-2])
    if flash and (enabled.flash_sdp_enabled() or cudnn):
        return "flash"
    aligned = not (width * query.element_size() % 16 or value.shape[-1] * query.element_size() % 16)
    if fused and aligned and (half or query.dtype == torch.float32) and (enabled.mem_efficient_sdp_enabled() or cudnn):
        return "efficient"
    if not enabled.math_sdp_enabled():
        hidden = "no mask" if mask is None else "a mask"  # torch prints reasons as warnings
        raise RuntimeError(f"No available kernel. Aborting execution. ({query.dtype}, heads of {width}, {hidden})")
    return "math"


def _is_hopper_or_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)


@cache
def _broadcasts_keys() -> bool:
    """Return whether torch's fused kernels can broadcast the keys of one head.

    They can from torch 2.14 on (pytorch#191085). The answer of the CPU's kernel holds for the GPU's kernels, too.
    """
    choice = vars(torch)["_fused_sdp_choice"]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        query, key = (torch.zeros(1, heads, 4, 8, device="cpu") for heads in (2, 1))
        return choice(query, key, key) != 0  # 0: attention by plain matrix multiplications


cuda_attention = partial(_fused_attention, "cuda")


def _cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run dropout as on a GPU, with a mask of one byte per element (torch's native_dropout)."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0.0 else input


def _ulysses(attention: Callable[..., Tensor], sp: int) -> Callable[..., Tensor]:
    """Wrap `attention`, so that it gets the full sequence and 1/sp of the heads.

    Inputs and output are (batch, heads, length / sp, head_dim). See runtime/sequence_parallel/ulysses_sp.py.
    """

    def behind_all_to_all(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        if key.shape[1] % sp:  # repeat key and value heads, so each rank has one
            key = key.repeat_interleave(sp // key.shape[1], dim=1)
            value = value.repeat_interleave(sp // value.shape[1], dim=1)
        out = attention(*(_gather(t, sp) for t in (query, key, value)), *args, **kwargs)
        batch, heads, length, dim = out.shape
        sent = out.permute(2, 0, 1, 3).reshape(sp, length // sp, batch, heads * dim).contiguous()
        back = _AllToAll.apply(sent).permute(1, 2, 0, 3).reshape(length // sp, batch, sp * heads * dim).contiguous()
        return back.reshape(length // sp, batch, sp * heads, dim).permute(1, 2, 0, 3)

    return behind_all_to_all


def _gather(x: Tensor, sp: int) -> Tensor:
    """Turn (batch, heads, length / sp, dim) into (batch, heads / sp, length, dim)."""
    batch, heads, length, dim = x.shape
    sent = x.permute(2, 0, 1, 3).reshape(length, batch, sp, heads // sp, dim)
    received = _AllToAll.apply(sent.permute(2, 0, 1, 3, 4).contiguous())
    return received.reshape(sp * length, batch, heads // sp, dim).permute(1, 2, 0, 3).contiguous()


class _AllToAll(torch.autograd.Function):
    """An all-to-all. In forward and in backward it receives into a new buffer of the same shape."""

    @staticmethod
    def forward(ctx: object, sent: Tensor) -> Tensor:
        return torch.empty_like(sent)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return torch.empty_like(grad.contiguous())
