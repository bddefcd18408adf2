"""Seconds of kernels and collectives by those that were measured: at the rate of the nearest in size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerofit.spec.measured_kernels import MeasuredCollective, MeasuredKernel
from zerofit.spec.profile import Kernel

WITH_PRODUCTS = ("product", "convolution", "attention")
NEARNESS = 4  # a point counts with this power of its nearness, so that the nearest outweigh the rest
ALIGNED = 8  # elements of 16 bits, 16 bytes: rows in memory that tensor cores read at full speed begin so far apart
HALF = ("float16", "bfloat16")
SAME = 1e-3  # of a logarithm: sizes that are equal


class _Point(NamedTuple):
    """Where something was measured, in logarithms of its sizes, and the logarithm of the rate there."""

    sizes: tuple[float, ...]
    rate: float


class KernelTable:
    """Rates of kernels by kind, dtype and shape; between those that were measured by their nearness in size."""

    def __init__(self, measured: Iterable[MeasuredKernel]):
        self._points: defaultdict[tuple[str, str, bool, bool], list[_Point]] = defaultdict(list)
        self._known: dict[tuple, float] = {}
        self.shapes = 0
        for one in measured:
            amount = _made(one.flops, one.causal) if one.kind in WITH_PRODUCTS else one.moved_bytes
            if amount <= 0 or one.seconds <= 0:
                continue
            self.shapes += 1
            point = _Point(_logs((*one.shape, amount)), math.log(amount / one.seconds))
            odd = one.kind == "product" and one.dtype in HALF and any(size % ALIGNED for size in one.shape)
            self._points[one.kind, one.dtype, one.groups > 1, odd].append(point)

    def seconds(self, kernel: Kernel, micro_batch: int, unaligned: float = 1.0) -> float | None:
        """Return the seconds of equal kernels; None where nothing of their kind and dtype was measured.

        Products with unaligned rows reach the share `unaligned` of the others, unless such ones were measured.
        """
        key, odd = (kernel.kind, kernel.dtype, kernel.groups > 1), bool(unaligned_lengths(kernel))
        points = self._points.get((*key, odd))
        share = unaligned if odd and not points else 1.0
        points = points or self._points.get((*key, not odd))
        if not points:
            return None
        products = kernel.kind in WITH_PRODUCTS
        whole = _made(kernel.flops.at(micro_batch), kernel.causal) if products else kernel.moved_bytes.at(micro_batch)
        if whole <= 0:
            return 0.0 if not products else None
        sizes = (*(size.at(micro_batch) for size in kernel.shape), whole / max(1.0, kernel.count))
        place = (*key, odd, sizes)
        if place not in self._known:
            self._known[place] = _rate_at(points, _logs(sizes))
        return whole / (share * self._known[place])


def unaligned_lengths(kernel: Kernel) -> list[int]:
    """Return how long rows of a product in 16 bits are that are no multiple of 16 bytes: 50,257 for GPT-2's logits.

    What grows with the samples is a number of rows, not their length.
    """
    if kernel.kind != "product" or kernel.dtype not in HALF:
        return []
    return [round(size.fixed) for size in kernel.shape if not size.per_sample and size.fixed % ALIGNED]


def _made(flops: float, causal: bool) -> float:
    """Return the FLOPs that a kernel makes: a causal mask spares half of them."""
    return 0.5 * flops if causal else flops


def _logs(sizes: Iterable[float]) -> tuple[float, ...]:
    return tuple(math.log(max(1.0, size)) for size in sizes)


def _rate_at(points: Sequence[_Point], sizes: tuple[float, ...]) -> float:
    """Return the rate at these sizes: that of a point, or between points by how near they are.

    Where the shape is not known on one side, the amount of work alone tells how near they are.
    """
    total = weights = 0.0
    for point in points:
        alike = len(point.sizes) == len(sizes)
        distance = math.dist(point.sizes, sizes) if alike else abs(point.sizes[-1] - sizes[-1])
        if distance < SAME:
            return math.exp(point.rate)
        weight = distance**-NEARNESS
        total, weights = total + weight * point.rate, weights + weight
    return math.exp(total / weights)


class CollectiveLine(NamedTuple):
    """What a collective takes: seconds of a call, and of each byte of the whole tensor."""

    call_s: float
    byte_s: float


class CollectiveTable:
    """Collectives within a node that were measured, as a line in the bytes, by op and ranks."""

    def __init__(self, measured: Iterable[MeasuredCollective]):
        sizes: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for one in measured:
            sizes[one.op, one.ranks].append((one.size_bytes, one.seconds))
        self._lines = {key: _line(sorted(found)) for key, found in sizes.items()}

    def line(self, op: str, ranks: int) -> CollectiveLine | None:
        """Return the line of an op; None where it was not measured between so many ranks."""
        return self._lines.get((op, ranks))


def _line(found: Sequence[tuple[float, float]]) -> CollectiveLine:
    """Return the line that is least off, as shares of the seconds; neither part of it is negative."""
    rows = [(1 / seconds, size / seconds) for size, seconds in found]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        call_s, byte_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if call_s >= 0 and byte_s >= 0:
            return CollectiveLine(call_s, byte_s)
    return CollectiveLine(0.0, b / bb) if bb else CollectiveLine(a / aa, 0.0)
