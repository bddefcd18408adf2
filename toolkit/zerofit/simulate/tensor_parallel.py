"""One rank's shard of a transformers model, as DeepSpeed's AutoTP makes it (deepspeed/module_inject/auto_tp.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.models.catalog import ModelError

# linear layers whose outputs are summed over the ranks, so that their inputs are split (AutoTP's all_reduce_linears)
_ROWS = ("o_proj", "down_proj", "output.dense")


def shard(model: Any, blocks: nn.ModuleList, degree: int) -> None:
    """Replace the blocks' linear layers and an untied `lm_head` by one rank's parts; changes the model.

    Raises ModelError where the degree does not divide a layer, or a block's matrices are not those of linear layers.
    """
    for block in blocks:
        linears = list(_linears(block))
        if {id(p) for p in block.parameters() if p.dim() > 1} != {id(linear.weight) for _, linear in linears}:
            message = f"tensor parallelism splits linear layers, and {type(block).__name__} has other matrices"
            raise ModelError("profile-tp", message)
        for path, linear in linears:
            made = _RowLinear if path.endswith(_ROWS) else _ColumnLinear
            _put(block, path, made(linear, degree))
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
        model.lm_head = _ColumnLinear(head, degree, gather=True)


def _linears(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((path, module) for path, module in block.named_modules() if isinstance(module, nn.Linear))


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, module)


class _ColumnLinear(nn.Module):
    """1/degree of the outputs; with `gather` the ranks' outputs are put together (LinearLayer)."""

    def __init__(self, linear: nn.Linear, degree: int, gather: bool = False):
        super().__init__()
        self.degree, self.gather = degree, gather
        self.weight = _part(linear.weight, 0, degree)
        self.bias = None if linear.bias is None else _part(linear.bias, 0, degree)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out / degree), or (..., out) where gathered."""
        out = torch.matmul(x, self.weight.transpose(-1, -2))
        if self.bias is not None:
            out = out + self.bias
        return _Gather.apply(out, self.degree) if self.gather else out


class _RowLinear(nn.Module):
    """1/degree of the inputs; the sum over the ranks happens in place, the bias comes after it (LinearAllreduce)."""

    def __init__(self, linear: nn.Linear, degree: int):
        super().__init__()
        self.weight, self.bias = _part(linear.weight, 1, degree), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / degree) to (..., out)."""
        out = torch.matmul(x, self.weight.transpose(-1, -2))
        return out if self.bias is None else out + self.bias


class _Gather(torch.autograd.Function):
    """All ranks' shards of the last dimension: received as one buffer, then put side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:
        ctx.width = x.shape[-1]
        received = torch.empty(degree, *x.shape, dtype=x.dtype)
        return torch.cat(list(received), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., : ctx.width].contiguous(), None


def _part(parameter: Tensor, dim: int, degree: int) -> nn.Parameter:
    size = parameter.shape[dim]
    if size % degree:
        raise ModelError("profile-tp", f"tensor parallel degree {degree} does not divide a layer of width {size}")
    shape = [*parameter.shape]
    shape[dim] = size // degree
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))
