"""Compute the seconds of kernels and collectives from measurements of similar sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerofit.spec.local_machine import MeasuredCollective, MeasuredKernel
from zerofit.spec.profile import Kernel

WITH_PRODUCTS = ("product", "convolution", "attention")
NEARNESS = 4  # exponent of a point's nearness in its weight: the nearest points count most
ALIGNED = 8  # 16-bit elements in 16 bytes: tensor cores run at full speed if rows are multiples of this
HALF = ("float16", "bfloat16")
SAME = 1e-3  # difference of logarithms below which sizes are equal


class _Point(NamedTuple):
    """A measurement: the logarithms of its sizes, and the logarithm of its rate."""

    sizes: tuple[float, ...]
    rate: float


# A measured kernel gives a rate (FLOP/s or bytes/s) at the logarithms of its sizes. The rate at other sizes is the mean
# of the logarithms of all measured rates, with weight 1 / distance^k (inverse distance weighting, Shepard, 1968). So a
# measured shape gets its own rate, and a shape that is far from all measured shapes gets about the mean.
class KernelTable:
    """Measured rates of kernels by kind, dtype and shape.

    A shape that was not measured gets a mean of the measured rates, in which similar sizes weigh more.
    """

    def __init__(self, measured: Iterable[MeasuredKernel]):
        self._points: defaultdict[tuple[str, str, bool, bool], list[_Point]] = defaultdict(list)
        self._known: dict[tuple, float] = {}
        self.shapes = 0
        for kernel in measured:
            amount = _made(kernel.flops, kernel.causal) if kernel.kind in WITH_PRODUCTS else kernel.moved_bytes
            if amount <= 0 or kernel.seconds <= 0:
                continue
            self.shapes += 1
            point = _Point(_logs((*kernel.shape, amount)), math.log(amount / kernel.seconds))
            odd = kernel.kind == "product" and kernel.dtype in HALF and any(size % ALIGNED for size in kernel.shape)
            self._points[kernel.kind, kernel.dtype, kernel.groups > 1, odd].append(point)

    def seconds(self, kernel: Kernel, micro_batch: int, unaligned: float = 1.0) -> float | None:
        """Return the seconds of equal kernels; None if no kernel like them was measured.

        A kernel is like them if it has the same kind and dtype, and if both or neither have several groups.

        `unaligned`: rate of matrix multiplications with unaligned rows, relative to aligned rows. It is used only
        if no matrix multiplication with unaligned rows was measured.
        """
        key, odd = (kernel.kind, kernel.dtype, kernel.groups > 1), bool(unaligned_lengths(kernel))
        points = self._points.get((*key, odd))
        share = unaligned if odd and not points else 1.0
        points = points or self._points.get((*key, not odd))
        if not points:
            return None
        products = kernel.kind in WITH_PRODUCTS
        amount = _made(kernel.flops.at(micro_batch), kernel.causal) if products else kernel.moved_bytes.at(micro_batch)
        if amount <= 0:
            return 0.0 if not products else None
        sizes = (*(size.at(micro_batch) for size in kernel.shape), amount / max(1.0, kernel.count))
        known_key = (*key, odd, sizes)
        if known_key not in self._known:
            self._known[known_key] = _rate_at(points, _logs(sizes))
        return amount / (share * self._known[known_key])


def unaligned_lengths(kernel: Kernel) -> list[int]:
    """Return the unaligned row lengths of a 16-bit product, e.g. 50,257 for GPT-2's logits.

    A row is unaligned if its length is not a multiple of 16 bytes. Sizes that grow with the samples are numbers of
    rows, not lengths.
    """
    if kernel.kind != "product" or kernel.dtype not in HALF:
        return []
    return [round(size.fixed) for size in kernel.shape if not size.per_sample and size.fixed % ALIGNED]


def _made(flops: float, causal: bool) -> float:
    """Return the FLOPs that a kernel computes: a causal mask skips half of the blocks."""
    return 0.5 * flops if causal else flops


def _logs(sizes: Iterable[float]) -> tuple[float, ...]:
    return tuple(math.log(max(1.0, size)) for size in sizes)


def _rate_at(points: Sequence[_Point], sizes: tuple[float, ...]) -> float:
    """Return the measured rate at these sizes, or a mean in which near points weigh more."""
    total = weights = 0.0
    for point in points:
        alike = len(point.sizes) == len(sizes)
        # without a shape, nearness depends only on the amount of work
        distance = math.dist(point.sizes, sizes) if alike else abs(point.sizes[-1] - sizes[-1])
        if distance < SAME:
            return math.exp(point.rate)
        weight = distance**-NEARNESS
        total, weights = total + weight * point.rate, weights + weight
    return math.exp(total / weights)


class CollectiveLine(NamedTuple):
    """Seconds of a collective: a part per call, and a part per byte of the full tensor."""

    call_s: float
    byte_s: float


class CollectiveTable:
    """Measured seconds of collectives within a node.

    For each op and number of ranks, the seconds are a linear function of the number of bytes.
    """

    def __init__(self, measured: Iterable[MeasuredCollective]):
        sizes: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for collective in measured:
            sizes[collective.op, collective.ranks].append((collective.size_bytes, collective.seconds))
        self._lines = {key: _line(sorted(points)) for key, points in sizes.items()}

    def line(self, op: str, ranks: int) -> CollectiveLine | None:
        """Return the line of an op; None if the op was not measured with `ranks` ranks."""
        return self._lines.get((op, ranks))


def _line(measured: Sequence[tuple[float, float]]) -> CollectiveLine:
    """Fit the line with the least relative error. Neither coefficient is negative."""
    rows = [(1 / seconds, size / seconds) for size, seconds in measured]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    # With measurements of one size, the determinant is 0 up to rounding, and any line through the point fits.
    if determinant > 1e-9 * aa * bb:
        call_s, byte_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if call_s >= 0 and byte_s >= 0:
            return CollectiveLine(call_s, byte_s)
    return CollectiveLine(0.0, b / bb) if bb else CollectiveLine(a / aa, 0.0)
