"""List the kernels of a traced step, with kind, shape, FLOPs and memory traffic.

Merge equal kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch._ops import OpOverload

from zerofit.simulate.ops.costs import OpArguments, OpKeywords, OpOutput, flops_of, leaves_of
from zerofit.spec.profile import Kernel, KernelKind, Linear

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
_FACTORS = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"))  # names of a product's arguments
_NORMALISATIONS = ("batch_norm", "layer_norm", "group_norm", "rms_norm", "softmax")
_COPIES = ("clone", "_to_copy", "copy_", "cat", "stack", "slice_backward", "index_select", "constant_pad_nd")


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of an op that launches a kernel, at one size of the micro batch."""

    kind: KernelKind
    dtype: str
    flops: int
    moved_bytes: int
    shape: tuple[int, ...] = ()  # see zerofit.spec.profile.Kernel
    groups: int = 1
    causal: bool = False


def call_of(func: OpOverload, args: OpArguments, kwargs: OpKeywords, out: OpOutput) -> KernelCall:
    """Return the kernel that a call of an op launches, with its shape, FLOPs and bytes."""
    name = func._overloadpacket.__name__
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    first = tensors[0] if tensors else out
    dtype = str(getattr(first, "dtype", "")).removeprefix("torch.")
    kind = _kind(name)
    call = KernelCall(
        kind=kind,
        dtype=dtype,
        flops=flops_of(func, args, kwargs, out),
        moved_bytes=_moved_bytes(kind, name, tensors, _written(func, args, out)),
    )
    if "batch_norm" in name:
        channels = next(one.shape[1] for one in tensors if one.dim() > 1)
        return replace(call, shape=(channels,), groups=channels)
    shape = _SHAPES.get(kind)
    # other attention ops have dimensions in another order, or pack samples into one dimension
    if shape is None or (kind == "attention" and not name.startswith("_scaled_dot_product")):
        return call
    arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return replace(
        call,
        shape=shape(arguments, out),
        groups=arguments.get("groups", 1),
        causal=bool(arguments.get("is_causal", False)),
    )


def one_kernel(call: KernelCall) -> Kernel:
    """Return a single call as a kernel. Its costs do not depend on the micro batch."""
    return Kernel(
        kind=call.kind,
        dtype=call.dtype,
        count=1.0,
        moved_bytes=Linear(fixed=call.moved_bytes),
        flops=Linear(fixed=call.flops),
        shape=tuple(Linear(fixed=size) for size in call.shape),
        groups=call.groups,
        causal=call.causal,
    )


def _kind(name: str) -> KernelKind:
    if name in _PRODUCTS:
        return "product"
    if "convolution" in name:
        return "convolution"
    if "attention" in name:
        return "attention"
    if any(part in name for part in _NORMALISATIONS):
        return "normalisation"
    if name.startswith("embedding"):
        return "embedding"
    return "copy" if name in _COPIES else "elementwise"


def _written(func: OpOverload, args: OpArguments, out: OpOutput) -> list[Tensor]:
    """Return the tensors that an op writes.

    These are its outputs. An op without outputs changes some of its arguments, e.g. an optimizer's lists.
    """
    made = [leaf for leaf in leaves_of(out) if isinstance(leaf, Tensor)]
    if made:
        return made
    changed = [
        value
        for one, value in zip(func._schema.arguments, args, strict=False)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return [leaf for leaf in leaves_of(changed) if isinstance(leaf, Tensor)]


def _moved_bytes(kind: KernelKind, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Count the bytes that an op reads and writes.

    An expanded tensor counts with its stored size.
    """
    written = sum(map(_stored_bytes, outputs))
    # an embedding reads only the rows that it writes, not the full table
    if name == "embedding":
        return 2 * written
    read = sum(map(_stored_bytes, inputs))
    # Batch norm reads activations twice in forward and in backward, first for the statistics and then to normalize
    # them (ATen/native/cuda/Normalization.cuh).
    if kind == "normalisation" and "batch_norm" in name:
        read += sum(_stored_bytes(t) for t in inputs if t.dim() > 1)
    return read + written


def _stored_bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product_shape(arguments: OpKeywords, out: OpOutput) -> tuple[int, ...]:
    """Return M, N, K of a matrix multiplication."""
    # (experts, K, N): each expert multiplies its own rows, so M is their average number
    names = next(pair for pair in _FACTORS if pair[0] in arguments)
    left, right = (arguments[name] for name in names)
    rows = left.shape[-2] if left.dim() == right.dim() else left.shape[-2] // right.shape[0]
    return rows, right.shape[-1], left.shape[-1]


def _convolution_shape(arguments: OpKeywords, out: OpOutput) -> tuple[int, ...]:
    """Return the output pixels of all samples, output channels per group, inputs of an output."""
    made = arguments.get("grad_output", out)
    weight, groups = arguments["weight"], arguments["groups"]
    return made.numel() // made.shape[1], made.shape[1] // groups, math.prod(weight.shape[1:])


def _attention_shape(arguments: OpKeywords, out: OpOutput) -> tuple[int, ...]:
    """Return four sizes: heads (over all samples), queries, keys, width of a head."""
    query, key = arguments["query"], arguments["key"]
    return query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3]


_SHAPES: dict[str, Callable[[OpKeywords, OpOutput], tuple[int, ...]]] = {
    "product": _product_shape,
    "convolution": _convolution_shape,
    "attention": _attention_shape,
}


# A kernel's size is a line in the micro batch, as are all costs (`layers`). The calls at two sizes of the micro batch
# come in the same order, so call N of one belongs to call N of the other. Equal kernels become one with a count, so
# profiles stay small.
def kernels_of(
    few: Sequence[KernelCall], more: Sequence[KernelCall], line: Callable[[Sequence[float]], Linear]
) -> tuple[Kernel, ...]:
    """Return the kernels of a section, from its calls at two sizes of the micro batch.

    `line` fits a line through two values. Kernels with the same kind and shape are merged. If the two micro batches
    ran different kernels, all kernels with the same kind are merged.
    """
    made: dict[tuple, tuple[list[KernelCall], list[KernelCall]]] = {}
    alike = [call.kind for call in few] == [call.kind for call in more]
    for a, b in zip(few, more, strict=True) if alike else ():
        shape = tuple(line(sizes) for sizes in zip(a.shape, b.shape, strict=True))
        pair = made.setdefault((a.kind, a.dtype, shape, a.groups, a.causal), ([], []))
        pair[0].append(a)
        pair[1].append(b)
    for n, calls in enumerate(() if alike else (few, more)):
        for call in calls:
            made.setdefault((call.kind, call.dtype, (), call.groups, call.causal), ([], []))[n].append(call)
    return tuple(
        Kernel(
            kind=kind,
            dtype=dtype,
            count=float(max(map(len, pair))),
            moved_bytes=line([sum(call.moved_bytes for call in calls) for calls in pair]),
            flops=line([sum(call.flops for call in calls) for calls in pair]),
            shape=shape,
            groups=groups,
            causal=causal,
        )
        for (kind, dtype, shape, groups, causal), pair in made.items()
    )
