"""Patch experts on fake tensors, so that all experts get equally many tokens."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm
from torch import Tensor
from torch._subclasses import fake_impls

from zerofit.models.build import bincount
from zerofit.simulate.fakes.device import NAME


def experts() -> None:
    """Spread tokens evenly over experts, since the real choice depends on values.

    (deepspeed.module_inject.auto_ep, auto_ep_layer, deepspeed.moe.ep_kernels)
    """
    from deepspeed.module_inject import auto_ep, auto_ep_layer
    from deepspeed.moe import ep_kernels

    auto_ep._gate_activation_matches = lambda experts_module: None  # compares values of the experts' activation
    auto_ep_layer.compute_split_plan = even_split_plan
    ep_kernels.fill_indices_cpu = ep_kernels.fill_indices_wrapper = unfilled_indices


def expert_ops() -> None:
    """Give ops of experts shape rules: the count of each expert's tokens, and products of fp32 experts.

    (torch.bincount, torch._grouped_mm)
    """

    def product(mode: object, func: object, mat_a: Tensor, *args: Any, **kwargs: Any) -> object:
        # torch's rule for 16 bits also checks that rows begin at multiples of 16 bytes
        if mat_a.dtype is not torch.float32:
            return NotImplemented
        return grouped_product(mode, func, mat_a, *args, **kwargs)

    fake_impls.op_implementations_dict[torch.ops.aten.bincount.default] = bincount
    fake_impls.op_implementations_dict[torch.ops.aten._grouped_mm.default] = product


def expert_rows() -> None:
    """Order the rows of experts as Triton's kernels do on a GPU. (deepspeed.moe.ep_kernels)"""
    from deepspeed.moe import ep_kernels

    ep_kernels.permute_rows_supported = lambda rows: rows.device.type == NAME
    ep_kernels.gather_rows = gather_rows


# The router's real choice depends on values. With tokens * chosen experts = n, each of `ep_size` ranks sends and
# receives n / ep_size rows. The first n mod ep_size ranks get one row more, so that no row is lost.
def even_split_plan(
    selected_experts: Tensor,
    num_experts: int,
    ep_size: int,
    num_local_experts: int,
    ep_group: object,
    num_tokens_per_expert: Tensor | None = None,
) -> object:
    """Return AutoEP's plan of the tokens that ranks send to each other.

    As in a real run, the ranks exchange their counts first. (deepspeed/module_inject/auto_ep_layer.py,
    compute_split_plan)
    """
    from deepspeed.module_inject.auto_ep_layer import SplitPlan

    assert num_tokens_per_expert is not None  # the layer passes its router's counts
    counts = num_tokens_per_expert.view(-1).contiguous()
    received = torch.empty_like(counts)
    if ep_size > 1:
        comm.all_to_all_single(received, counts, group=ep_group)
    share, more = divmod(selected_experts.numel(), ep_size)
    splits = [share + (rank < more) for rank in range(ep_size)]
    return SplitPlan(splits, splits, received.view(ep_size, num_local_experts))


def unfilled_indices(
    counts: Tensor, starts: Tensor, offsets: Tensor, experts_per_rank: int, num_ranks: int, max_len: int, *_: object
) -> Tensor:
    """Return -1 for each row, since its real place is unknown.

    (deepspeed/moe/ep_kernels.py, fill_indices_*)
    """
    return torch.full((max_len,), -1, dtype=torch.int32, device=counts.device)


def gather_rows(src: Tensor, index: Tensor) -> Tensor:
    """Return the tensor that Triton's kernel fills with rows of `src`.

    (deepspeed/moe/ep_kernels.py, gather_rows)
    """
    return torch.empty((index.numel(), src.shape[1]), dtype=src.dtype, device=src.device)


def grouped_product(
    fake_mode: object,
    func: object,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the output of torch._grouped_mm. Before torch 2.15, it has no shape rule for fp32."""
    # forward and gradient of the inputs:  (rows, k) x (groups, k, n) -> (rows, n)
    # gradient of the matrices:            (k, rows) x (rows, n)      -> (groups, k, n), each over its group's rows
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        shape = (offs.numel(), mat_a.shape[0], mat_b.shape[1])
    else:
        shape = (*mat_a.shape[:-1], mat_b.shape[-1])
    return mat_a.new_empty(shape, dtype=out_dtype or mat_a.dtype)
