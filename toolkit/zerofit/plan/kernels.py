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
# Rates of matrix multiplications fall with small or unaligned dimensions (`rates.ProductRate`, `_aligned_share`).
# If a kernel's shape was measured on the device, the measured time is used.
def kernel_s(kernel: Kernel, micro_batch: int, rates: Rates) -> float:
    """Return the seconds of equal kernels, as measured for their kind or from the rates."""
    seconds = rates.kernels.seconds(kernel, micro_batch, _aligned_share(kernel, rates)) if rates.kernels else None
    if seconds is None:
        reached = rates.memory
        if kernel.kind == "normalisation" and kernel.groups > 1:
            # of a batch norm, one block of the GPU processes a channel
            reached = min(reached, kernel.groups * rates.channel.get(kernel.dtype, math.inf))
        moved_s = kernel.moved_bytes.at(micro_batch) / reached
        moved_s *= 1.0 if kernel.kind in WITH_PRODUCTS else rates.unfused
        seconds = max(_compute_s(kernel, micro_batch, rates), moved_s)
    else:
        seconds *= rates.slower * (1.0 if kernel.kind in WITH_PRODUCTS else rates.unfused)
    return seconds * rates.longer.get(kernel.kind, 1.0)


def _compute_s(kernel: Kernel, micro_batch: int, rates: Rates) -> float:
    """Return the compute time of a kernel at the rate for its shape, in seconds."""
    flops = kernel.flops.at(micro_batch)
    if not flops:
        return 0.0
    # () if the shape differs between micro batches; then no waste is counted
    sizes = [max(1.0, size.at(micro_batch)) for size in kernel.shape]
    if kernel.kind == "convolution":
        if kernel.groups == 1:
            return flops / rates.flops
        # the rate of grouped convolutions grows with the channels per group
        channels = sizes[1] if sizes else 1.0
        least = rates.depthwise if kernel.dtype == "float16" else 0.0
        return flops / min(rates.flops, max(least, channels * rates.general))
    if kernel.kind == "attention":  # a causal mask skips half of the blocks
        made_s = (0.5 if kernel.causal else 1.0) * flops / rates.attention
        return made_s * rates.attention_shape.slower(kernel, micro_batch)
    # Tiles at the edges are partly empty, and few tiles leave a part of the device idle. A product of shape M x N x K
    # reaches 1 / (1 + edge (1/M + 1/N + 1/K)) of the best rate.
    return flops / (_aligned_share(kernel, rates) * rates.flops) * (1 + rates.edge * sum(1 / size for size in sizes))


def _aligned_share(kernel: Kernel, rates: Rates) -> float:
    """Return a matrix multiplication's rate, relative to the rate with rows aligned to 16 bytes."""
    lengths = unaligned_lengths(kernel)
    if not lengths:
        return 1.0
    return rates.unaligned if any(length % 2 for length in lengths) else rates.unaligned_even
