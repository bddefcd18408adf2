"""Kernels of a measured trace with their shapes: products and fused attention, from the shapes that torch records."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofit.report.traces import Event
from zerofit.spec.measured_kernels import MeasuredKernel

DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_"
BACKWARD = 2.5  # times the FLOPs of its forward


def measured_kernels(path: Path) -> tuple[MeasuredKernel, ...]:
    """Return the products and attention of a trace that `read_trace` has read, equal ones once with their median."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    on_device: defaultdict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            on_device[event.get("args", {}).get("External id")] += event["dur"]
    taken: defaultdict[MeasuredKernel, list[float]] = defaultdict(list)
    for event in events:
        kernel = _kernel(event) if event.get("cat") == "cpu_op" else None
        micros = on_device.get(event["args"].get("External id"), 0.0) if kernel and on_device else event["dur"]
        if kernel and micros > 0:
            taken[kernel].append(micros)
    return tuple(replace(kernel, seconds=statistics.median(of) / 1e6) for kernel, of in taken.items())


def _kernel(event: Event) -> MeasuredKernel | None:
    """Return what an op computes, without its seconds; None for others, and where no shapes were recorded."""
    name, arguments = event["name"], event.get("args", {})
    shapes = [tuple(shape) for shape in arguments.get("Input Dims", ()) if shape and not isinstance(shape[0], list)]
    dtype = next((DTYPES[one] for one in arguments.get("Input type", ()) if one in DTYPES), "")
    if not shapes or not dtype:
        return None
    if name in PRODUCTS:
        return _product(shapes, dtype)
    if name.startswith(ATTENTION):
        return _attention(name, [shape for shape in shapes if len(shape) == 4], dtype, arguments)
    return None


def _product(shapes: list[tuple[int, ...]], dtype: str) -> MeasuredKernel | None:
    left, right = [shape for shape in shapes if len(shape) > 1][-2:]
    rows, inner, columns = left[-2], left[-1], right[-1]
    flops = 2.0 * math.prod(left[:-2]) * rows * inner * columns
    if not flops:
        return None
    return MeasuredKernel(kind="product", dtype=dtype, shape=(rows, columns, inner), flops=flops, seconds=0.0)


def _attention(
    name: str, shapes: list[tuple[int, ...]], dtype: str, arguments: Mapping[str, Any]
) -> MeasuredKernel | None:
    backward = name.endswith("_backward")
    if len(shapes) < 3 + backward:
        return None
    (batch, heads, queries, width), (*_, keys, _) = shapes[backward], shapes[backward + 1]
    return MeasuredKernel(
        kind="attention",
        dtype=dtype,
        shape=(batch * heads, queries, keys, width),
        flops=(BACKWARD if backward else 1.0) * 4.0 * batch * heads * queries * keys * width,
        causal="True" in _words(arguments.get("Concrete Inputs", ())),
        seconds=0.0,
    )


def _words(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in values]
