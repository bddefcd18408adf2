"""Memory that kernels and collectives take while they run and give back, which fake tensors do not show.

Only what a source states exactly is here. oneDNN's convolutions and bf16 products take scratch that depends on the
processor; `benchmarks/meter/scratch.py` measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerofit.simulate.target import SimulationTarget
from zerofit.simulate.tracker import Scratch

_Formula = Callable[[Any, Any], int]  # (args, out) -> bytes


def scratch_of(target: SimulationTarget) -> Scratch:
    """The scratch of the ops of the target's device."""
    table = ON_GPU if target.accelerator == "cuda" else ON_CPU

    def scratch(op: str, args: Any, kwargs: Any, out: Any) -> int:
        formula = table.get(op)
        return formula(args, out) if formula else 0

    return scratch


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _output_of_gather(args: Any, out: Any) -> int:
    return _bytes(args[0])


def _input_of_scatter(args: Any, out: Any) -> int:
    return _bytes(args[1])


def _softmax_mask(args: Any, out: Any) -> int:
    """A bool for each element and each row of the scores."""
    return args[0].numel() + args[0].numel() // args[0].shape[-1] + 4


def _flash_backward(args: Any, out: Any) -> int:
    """Float32 accumulator of the query's gradient, padded to blocks of 128 rows and 32 columns, and the row sums.

    ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum and softmax_d. With fewer key than query
    heads, dk and dv are first made for every query head.
    """
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    accumulated = 4 * batch * heads * rows * (columns + 1)
    expanded = 2 * batch * heads * key.shape[2] * width * key.element_size() if key.shape[1] != heads else 0
    return accumulated + expanded


# torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: all-gather goes through a flat copy of the output, reduce-scatter
# through a clone of the input that is all-reduced. aten: batch_norm_cpu's backward multiplies into a copy of the input,
# _safe_softmax compares all scores with -inf.
ON_CPU: dict[str, _Formula] = {
    "c10d::_allgather_base_": _output_of_gather,
    "c10d::allgather_": _output_of_gather,
    "c10d::_reduce_scatter_base_": _input_of_scatter,
    "aten::native_batch_norm": lambda args, out: 8 * args[0].shape[1],
    "aten::native_batch_norm_backward": lambda args, out: _bytes(args[1]),
    "aten::_safe_softmax": _softmax_mask,
}

ON_GPU: dict[str, _Formula] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}
