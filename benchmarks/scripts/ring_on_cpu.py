"""torch's ring attention with the kernels of CPUs, which `context_parallel` lacks."""

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention

_ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Ring(torch.autograd.Function):
    """Causal attention of a process group's ranks, each of which has a part of the sequence (dimension 2)."""

    @staticmethod
    def forward(ctx, group, q, k, v):
        out, sums = _attention._templated_ring_attention(group, 2, _ATTEND, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad):
        named = ("query", "key", "value", "out", "logsumexp")
        tensors = dict(zip(named, ctx.saved_tensors, strict=True), grad_out=grad, grad_out_name="grad_out")
        found = _attention._templated_ring_attention_backward(
            ctx.group, 2, _BACKWARD, **tensors, is_causal=True, dropout_p=0.0
        )
        return None, *found[:3]
