"""Count the FLOPs of ops on fake tensors, and the scratch memory of running kernels.

FLOPs are torch's own count. Ops that torch does not count are added. Scratch memory is counted only if a source
states it exactly. The scratch memory of oneDNN's convolutions and bf16 matmuls depends on the processor;
`benchmarks/meter/scratch.py` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# torch does not type the arguments and results of ops: numbers, tensors, None, or lists of them
OpArguments = Sequence[Any]
OpKeywords = dict[str, Any]
OpOutput = Any
Scratch = Callable[
    [str, OpArguments, OpKeywords, OpOutput], int
]  # (op, args, kwargs, out) -> bytes alive only while the op runs


def flops_of(func: OpOverload, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> int:
    """Return the FLOPs of one call of an op: 2 per multiply-add, 0 without multiply-adds."""
    count = _COUNTERS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    if not count:
        return 0
    if func._overloadname.startswith("dtype"):
        args = args[:-1]  # the output's type, which the counters of torch before 2.14 mistake for its shape
    return count(*args, **kwargs, out_val=out)


def added_to(func: OpOverload, args: OpArguments, caller: FrameType | None) -> Tensor | None:
    """Return the older gradient if this op is autograd's sum of two gradients; otherwise None.

    `caller`: the op's Python frame. An addition in a node's own formula is mistaken for a sum of gradients.
    """
    # A real run adds in place if nothing else refers to the older gradient (autograd/input_buffer.cpp, accumulate).
    # While a dispatch mode is active, autograd makes a new tensor instead.
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or not torch._C._current_autograd_node():
        return None
    while caller is not None and caller.f_code.co_filename.endswith(
        ("torch/_dynamo/eval_frame.py", "torch/_compile.py")
    ):
        caller = caller.f_back  # frames around every mode
    if caller is not None and not caller.f_code.co_filename.endswith("torch/autograd/graph.py"):
        return None
    older: Tensor = args[0]
    return older if older.untyped_storage().nbytes() == older.nbytes else None


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count attention's FLOPs. A causal mask does not reduce them."""
    return sdpa_flop_count(query.shape, *_ungrouped(query, key, value))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, *_ungrouped(query, key, value))


def _ungrouped(query: Tensor, *grouped: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of keys and values with as many heads as queries."""
    # torch 2.11's counter ignores groups
    return [(len(one), query.shape[1], *one.shape[2:]) for one in grouped]


def _product(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    """Count the FLOPs of a product of matrices, or of batches of them."""
    # torch's counter is slower
    return 2 * a.numel() * b.shape[-1]


def _grouped(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    """Count the FLOPs of a mixture of experts: (tokens, k) times (experts, k, n)."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *more: Any, **_: object) -> int:
    """Count the forward's FLOPs once for each gradient."""
    # torch 2.11 counts the weight's gradient `groups` times
    transposed, wanted = more[4], more[7]
    return conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed) * sum(wanted[:2])


_COUNTERS: dict[object, Callable[..., int]] = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.bmm: _product,
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _COUNTERS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _attention
    _COUNTERS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _attention_backward
# ops that call cuBLAS on a GPU
BLAS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm")
)


def leaves_of(value: object) -> list[Any]:
    """Return the leaves of an op's arguments or output, four times as fast as tree_leaves."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [value]


def bytes_of(value: object) -> int:
    """Return the bytes of all tensors in a structure."""
    return sum(t.numel() * t.element_size() for t in leaves_of(value) if isinstance(t, Tensor))


def _softmax_mask(args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of two masks: a bool for each element and for each row of the scores."""
    return args[0].numel() + args[0].numel() // args[0].shape[-1] + 4


# ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: in float32, dq is added up in rows of padded size
# (dq_accum), and each row has the sum of its gradients (softmax_d). Fewer key heads than query heads need dk and dv for
# every query head first.
#
#   bytes = 4 * batch * heads * rows * columns + 4 * batch * heads * rows      rows to 128, columns to 32
def _flash_backward(args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of dq's accumulator, of row sums, and of dk and dv for every query head."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    accumulated = 4 * batch * heads * rows * (columns + 1)
    expanded = 2 * batch * heads * key.shape[2] * width * key.element_size() if key.shape[1] != heads else 0
    return accumulated + expanded


def _ragged_flash_backward(args: OpArguments, out: OpOutput) -> int:
    """Count the same bytes for sequences in one tensor, each padded by 128 rows.

    Source: flash_api.cpp, mha_varlen_bwd.
    """
    query, key, starts = args[1], args[2], args[6]
    tokens, heads, width = query.shape
    rows, columns = tokens + 128 * (starts.numel() - 1), -(-width // 32) * 32
    expanded = 2 * key.shape[0] * heads * width * key.element_size() if key.shape[1] != heads else 0
    return 4 * heads * rows * (columns + 1) + expanded


def _copies(*places: int) -> Callable[[OpArguments, OpOutput], int]:
    """Return a function that counts the bytes that an op copies.

    An op copies those of its arguments at `places` that are not contiguous.
    """
    return lambda args, out: bytes_of([args[place] for place in places if not args[place].is_contiguous()])


# ATen/native/LinearAlgebra.cpp (addmm_impl_cpu_) and cuda/cuBlasCommonArgs.h (prepare_matrix_for_cublas), e.g. for the
# gradient that sum() expands
def _unordered(args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of the matrices that BLAS needs copied: neither their rows nor their columns are contiguous."""
    matrices = [m for m in args if isinstance(m, Tensor)][-2:]  # the first argument of addmm is added to their product
    return sum(bytes_of(m) for m in matrices if not (_has_rows(m) or _has_rows(m.mT)))


def _has_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= max(1, matrix.shape[1])


def _reduced(args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of the per-element losses that an op stores before it reduces them.

    Return 0 if the op does not reduce (args[2] is 0).
    """
    whole = torch.broadcast_tensors(*args[:2])[0]
    return whole.numel() * out.element_size() if args[2:3] != (0,) else 0


def _padded_rows(args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of both matrices of a distance, each with two more columns."""
    return sum(bytes_of(one) // one.shape[-1] * (one.shape[-1] + 2) for one in args[:2])


def _flattened(tensors: object) -> int:
    """Count the bytes of NCCL's flat copy of a list of tensors."""
    # It makes none if their sizes differ.
    return bytes_of(tensors) if len({t.shape for t in leaves_of(tensors)}) == 1 else 0


# ATen/native: SoftMax.cpp, cuda/SoftMax.cu, layer_norm.cpp and cuda/layer_norm_kernel.cu copy tensors that are not
# contiguous; Loss.cpp stores the loss of each element before it adds them up. ReduceOps.cpp (logsumexp) stores
# exponentials and maxima, Distance.cpp both matrices with their norms, LossCTC.cpp backward variables. The solvers in
# BatchLinearAlgebra.cpp overwrite a copy of the matrix.
_ANYWHERE: dict[str, Callable[[OpArguments, OpOutput], int]] = {
    "aten::_softmax": _copies(0),
    "aten::_log_softmax": _copies(0),
    "aten::_softmax_backward_data": _copies(0, 1),
    "aten::_log_softmax_backward_data": _copies(0, 1),
    "aten::native_layer_norm": _copies(0),
    "aten::native_layer_norm_backward": _copies(0, 1),
    "aten::mse_loss": _reduced,
    "aten::smooth_l1_loss": _reduced,
    "aten::huber_loss": _reduced,
    "aten::binary_cross_entropy_with_logits": lambda args, out: 2 * bytes_of(args[0]) - bytes_of(out),
    "aten::logsumexp": lambda args, out: bytes_of(args[0]) + bytes_of(out),
    "aten::_euclidean_dist": _padded_rows,
    "aten::_ctc_loss_backward": lambda args, out: bytes_of(args[6]),
    "aten::mm": _unordered,
    "aten::addmm": _unordered,
    "aten::_linalg_svd": lambda args, out: bytes_of(args[0]),
    # measured: besides the copy 5 bytes a row, for pivots and a check
    "aten::linalg_inv_ex": lambda args, out: bytes_of(args[0]) + 5 * args[0].numel() // max(1, args[0].shape[-1]),
    "aten::linalg_lu": lambda args, out: bytes_of(args[0]),
    "aten::cholesky_solve": lambda args, out: bytes_of(args[1]),
}
# Kind of device -> op -> bytes of (args, out). torch/csrc/distributed/c10d: Gloo's all-gather uses a flat copy of the
# output, its reduce-scatter an all-reduced clone of the input. Both backends copy lists of tensors into flat tensors.
# Gloo leaves out the rank's own part of a reduce-scatter. aten: batch_norm_cpu's backward multiplies into a copy of
# the input, _safe_softmax compares all scores with -inf, median partitions a copy of the input (Sorting.cpp).
KERNEL_SCRATCH: dict[str, dict[str, Callable[[OpArguments, OpOutput], int]]] = {
    "cpu": {
        **_ANYWHERE,
        "c10d::_allgather_base_": lambda args, out: bytes_of(args[0]),
        "c10d::allgather_": lambda args, out: bytes_of(args[0]),
        "c10d::_reduce_scatter_base_": lambda args, out: bytes_of(args[1]),
        "c10d::reduce_scatter_": lambda args, out: bytes_of(args[1]) - bytes_of(args[0]),
        "c10d::scatter_": lambda args, out: bytes_of(args[1]),
        "c10d::gather_": lambda args, out: bytes_of(args[0]),
        "c10d::alltoall_": lambda args, out: bytes_of(args[:2]),
        "_c10d_functional::all_gather_into_tensor": lambda args, out: bytes_of(out),
        "_c10d_functional::reduce_scatter_tensor": lambda args, out: bytes_of(args[0]),
        "aten::native_batch_norm": lambda args, out: 8 * args[0].shape[1],
        "aten::native_batch_norm_backward": lambda args, out: bytes_of(args[1]),
        "aten::_safe_softmax": _softmax_mask,
        "aten::median": lambda args, out: bytes_of(args[0]),
        "aten::nanmedian": lambda args, out: bytes_of(args[0]),
        # oneDNN's LSTM: weights in its own layout (in backward gradients, too), the sum of the biases, the four gates
        "aten::mkldnn_rnn_layer": lambda args, out: bytes_of(args[1:4]) + 4 * bytes_of(out[0]),
        "aten::mkldnn_rnn_layer_backward": lambda args, out: 2 * bytes_of(args[1:3]) + 4 * bytes_of(args[7]),
    },
    "cuda": {
        **_ANYWHERE,
        "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
        "torch_attn::_varlen_attn_backward": _ragged_flash_backward,
        "c10d::allgather_": lambda args, out: _flattened(args[0]),
        "c10d::reduce_scatter_": lambda args, out: _flattened(args[1]),
    },
}


def scratch_on(device: str) -> Scratch:
    """Return a function that counts the scratch bytes of ops on `device` ("cpu" or "cuda")."""
    table = KERNEL_SCRATCH[device]

    def scratch(op: str, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> int:
        formula = table.get(op)
        if formula:
            return formula(args, out)
        return _casts(op, args, out) if device == "cpu" and _is_pointwise(op) else 0

    return scratch


# LAPACK and cuSOLVER compute the size of their workspace when they are called (native/BatchLinearAlgebra.cpp;
# native/cuda/linalg/BatchLinearAlgebraLib.cpp: ..._bufferSize). The temporaries of matrix_exp depend on the norm of the
# matrix (native/LinearAlgebra.cpp, mexp_impl).
_SOLVERS = frozenset(
    f"aten::{name}"
    for name in (
        *("_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "_linalg_svd", "linalg_qr", "geqrf"),
        *("ormqr", "linalg_householder_product", "linalg_cholesky_ex", "cholesky_inverse", "linalg_lu", "linalg_lstsq"),
        *("linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_inv_ex"),
        *("linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_matrix_exp"),
    )
)


def uncounted(device: str, op: str, args: OpArguments) -> str:
    """Return what `scratch_on` does not count of an op, since only the library knows its size; "" if nothing."""
    if op in _SOLVERS:
        return f"{op}: its workspace is not counted"
    convolves = op in ("aten::convolution", "aten::convolution_backward")
    if device == "cpu" and (convolves or (op in BLAS and args[0].itemsize == 2)):
        return "scratch memory of oneDNN's convolutions and 16-bit matrix products is not counted"
    return ""


@cache
def _is_pointwise(op: str) -> bool:
    namespace, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


# A CPU kernel gets copies of its operands in the dtype it computes in (ATen/TensorIterator.cpp, compute_types). A GPU
# kernel casts while it reads. E.g. float32 += bfloat16 copies the second operand: 4 bytes an element.
def _casts(op: str, args: OpArguments, out: OpOutput) -> int:
    """Count the bytes of operands, and of a result in place, that a pointwise op converts."""
    computed = args[1:] if op == "aten::where" else args  # the condition is not cast, and neither is a mask
    operands = [one for one in computed if isinstance(one, Tensor) and one.dim() and not op.startswith("aten::masked")]
    if not operands or not isinstance(out, Tensor) or len({one.dtype for one in (*operands, out)}) == 1:
        return 0
    common = reduce(torch.promote_types, (one.dtype for one in operands))
    if out.dtype != torch.bool:  # e.g. a quotient of integers is a float, a sum of bools an integer
        common = torch.promote_types(common, out.dtype)
    changed = [out] if op.endswith("_") and out.dtype != common else []
    return sum(one.numel() * common.itemsize for one in (*operands, *changed) if one.dtype != common)
