"""Compute the seconds of kernels on a device: the longer of compute time and memory time."""

from __future__ import annotations

import math
from collections.abc import Iterable

from zerofit.plan.measured_rates import WITH_PRODUCTS, unaligned_lengths
from zerofit.plan.rates import Rates
from zerofit.spec.profile import Kernel


def launches(kernels: Iterable[Kernel]) -> float:
    """Return the number of kernel launches."""
    return sum(kernel.count for kernel in kernels)


def kernels_s(kernels: Iterable[Kernel], micro_batch: int, rates: Rates) -> float:
    """Return the seconds of kernels that run one after the other."""
    return sum(kernel_s(kernel, micro_batch, rates) for kernel in kernels)


# The roofline model (Williams, Waterman, Patterson, 2009): a kernel takes the longer of
#
#     FLOPs / rate of its kind (matrix multiplications, attention, convolutions), and bytes moved / memory bandwidth
#
# Rates of matrix multiplications fall with small or unaligned dimensions (`rates.ProductRate`, `rates.UnalignedShare`).
# If a kernel's shape was measured on the device, the measured time is used.
def kernel_s(kernel: Kernel, micro_batch: int, rates: Rates) -> float:
    """Return the seconds of equal kernels: a measured time if their shape was measured, else a time from the rates."""
    measured_s = rates.kernels.seconds(kernel, micro_batch, _aligned_share(kernel, rates)) if rates.kernels else None
    if measured_s is None:
        measured_s = max(_compute_s(kernel, micro_batch, rates), _memory_s(kernel, micro_batch, rates))
    else:
        measured_s *= rates.slower * (1.0 if kernel.kind in WITH_PRODUCTS else rates.unfused)
    return measured_s * rates.longer.get(kernel.kind, 1.0)


def _memory_s(kernel: Kernel, micro_batch: int, rates: Rates) -> float:
    reached = rates.memory
    if kernel.kind == "normalisation" and kernel.groups > 1:
        reached = min(reached, kernel.groups * rates.channel.get(kernel.dtype, math.inf))
    moved_s = kernel.moved_bytes.at(micro_batch) / reached
    return moved_s if kernel.kind in WITH_PRODUCTS else moved_s * rates.unfused


def _compute_s(kernel: Kernel, micro_batch: int, rates: Rates) -> float:
    """Return the compute time of a kernel at the rate for its shape, in seconds.

    Tiles at the edges are partly empty. If there are few tiles, part of the device is idle. So a matrix
    multiplication reaches 1 / (1 + edge (1/M + 1/N + 1/K)) of the best rate. Attention with a causal mask skips
    half of its blocks. If a kernel's shape differs between micro batches, no shape is recorded, and no waste is
    counted.
    """
    flops = kernel.flops.at(micro_batch)
    if not flops:
        return 0.0
    sizes = [max(1.0, size.at(micro_batch)) for size in kernel.shape]
    if kernel.kind == "convolution":
        return flops / (rates.flops if kernel.groups == 1 else _grouped(kernel, sizes, rates))
    if kernel.kind == "attention":
        made_s = (0.5 if kernel.causal else 1.0) * flops / rates.attention
        return made_s * rates.attention_shape.slower(kernel, micro_batch)
    return flops / (_aligned_share(kernel, rates) * rates.flops) * (1 + rates.edge * sum(1 / size for size in sizes))


def _grouped(kernel: Kernel, sizes: list[float], rates: Rates) -> float:
    """Return the FLOP/s of a grouped convolution. They grow with the channels per group."""
    channels = sizes[1] if sizes else 1.0
    least = rates.depthwise if kernel.dtype == "float16" else 0.0
    return min(rates.flops, max(least, channels * rates.general))


def _aligned_share(kernel: Kernel, rates: Rates) -> float:
    """Return a matrix multiplication's rate, relative to the rate with rows aligned to 16 bytes."""
    lengths = unaligned_lengths(kernel)
    if not lengths:
        return 1.0
    return rates.unaligned if any(length % 2 for length in lengths) else rates.unaligned_even
