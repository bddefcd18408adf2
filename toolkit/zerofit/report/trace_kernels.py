"""Extract matrix multiplications and fused attention from a measured trace."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from zerofit.report.traces import TraceEvent, read_events
from zerofit.spec.measured_kernels import MeasuredKernel

# FLOPs from recorded shapes. A matrix multiplication (m, k) x (k, n) has 2 m k n. Attention has 4 b h q k w: two matrix
# multiplications of 2 q k w for each of b x h heads. Its backward recomputes the scores, so it has 5 instead of 2.
DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_"
LOG_SUMS = ("efficient_attention", "cudnn_attention")  # their forward has `compute_log_sumexp` as a fifth argument
BACKWARD = 2.5  # FLOPs relative to forward


def measured_kernels(path: Path) -> tuple[MeasuredKernel, ...]:
    """Return the kinds of kernels in a measured trace, each with its median time."""
    events, _ = read_events(path)
    # On a GPU an op's duration is only the time to launch it; its kernels carry the op's external id.
    on_device: defaultdict[object, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            on_device[str(event.get("args", {}).get("External id"))] += event["dur"]
    times: defaultdict[MeasuredKernel, list[float]] = defaultdict(list)
    for event in events:
        kernel = _kernel(event) if event.get("cat") == "cpu_op" else None
        if kernel is None:
            continue
        micros = on_device.get(str(event.get("args", {}).get("External id")), 0.0) if on_device else event["dur"]
        if micros > 0:
            times[kernel].append(micros)
    return tuple(replace(kernel, seconds=statistics.median(of) / 1e6) for kernel, of in times.items())


def _kernel(event: TraceEvent) -> MeasuredKernel | None:
    """Return the kernel of an op without seconds; None for other ops, or without shapes."""
    name, arguments = event["name"], event.get("args", {})
    shapes = [tuple(shape) for shape in _listed(arguments, "Input Dims") if _is_shape(shape)]
    types = map(str, _listed(arguments, "Input type"))
    dtype = next((DTYPES[name] for name in types if name in DTYPES), "")
    if not shapes or not dtype:
        return None
    if name in PRODUCTS:
        return _product(shapes, dtype)
    if name.startswith(ATTENTION):
        return _attention(name, [shape for shape in shapes if len(shape) == 4], dtype, arguments)
    return None


def _product(shapes: list[tuple[int, ...]], dtype: str) -> MeasuredKernel | None:
    # addmm and baddbmm have the bias first, which may be a matrix. The last two arguments are the factors.
    factors = [shape for shape in shapes if len(shape) > 1][-2:]
    if len(factors) < 2:
        return None
    a, b = factors
    rows, inner, columns = a[-2], a[-1], b[-1]
    flops = 2.0 * math.prod(a[:-2]) * rows * inner * columns
    if not flops:
        return None
    return MeasuredKernel(kind="product", dtype=dtype, shape=(rows, columns, inner), flops=flops, seconds=0.0)


def _attention(
    name: str, shapes: list[tuple[int, ...]], dtype: str, arguments: Mapping[str, object]
) -> MeasuredKernel | None:
    backward = name.endswith("_backward")
    if len(shapes) < 3 + backward:
        return None
    # the backward's first argument is the gradient of the result; query and key follow
    (batch, heads, queries, width), (*_, keys, _) = shapes[backward], shapes[backward + 1]
    # Without compute_log_sumexp, only `is_causal` can be True: torch passes False as return_debug_mask.
    values = _listed(arguments, "Concrete Inputs")
    if name.endswith(LOG_SUMS):
        values = values[:4] + values[5:]
    return MeasuredKernel(
        kind="attention",
        dtype=dtype,
        shape=(batch * heads, queries, keys, width),
        flops=(BACKWARD if backward else 1.0) * 4.0 * batch * heads * queries * keys * width,
        causal="True" in map(str, values),
        seconds=0.0,
    )


def _listed(arguments: Mapping[str, object], name: str) -> list[object]:
    value = arguments.get(name)
    return value if isinstance(value, list) else []


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) and size >= 0 for size in value)
