"""Compute the seconds of kernels and collectives.

A kernel takes the longer of compute time and memory time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zerofit.plan.measured_rates import WITH_PRODUCTS, unaligned_lengths
from zerofit.plan.rates import Rates
from zerofit.spec.profile import Kernel

# bytes that each of n ranks sends for a tensor of one byte, with ring algorithms
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0 if n > 1 else 0.0,
}


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


# NCCL's rings: for n ranks and S bytes, each rank sends (n - 1)/n S in an all-gather or reduce-scatter,
# and twice as many in an all-reduce. The time is bytes / bandwidth + calls x latency. Small all-reduces have
# the latency of a tree. A group that spans nodes has rings inside each node and rings across nodes. Chunks
# move through both kinds of rings at once, so the slower kind counts.
@dataclass(frozen=True)
class RankGroup:
    """The number of ranks of a collective, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return -(-self.size // self.per_node)


def group_of(size: int, stride: int, gpus: int) -> RankGroup:
    """Return a group of `size` ranks, `stride` apart. Each node has `gpus` ranks."""
    return RankGroup(size, max(1, min(size, gpus // stride)))


def sent_bytes(op: str, size_bytes: float, ranks: int) -> float:
    """Return the bytes that one rank sends.

    `size_bytes`: size of the full tensor, which is gathered or not yet scattered.
    """
    return size_bytes * _SENT[op](ranks)


def collective_s(
    op: str, size_bytes: float, calls: float, group: RankGroup, rates: Rates, *, at_once: bool = False
) -> float:
    """Return the seconds to move `size_bytes` in `calls` calls.

    `at_once`: the calls are issued together, so the ranks wait for each other once. If it is False, other kernels
    run between the calls, as they did in the measurements.
    """
    if group.size == 1:
        return 0.0
    longer = rates.longer.get(op.replace("_", "-"), 1.0) if rates.longer else 1.0
    line = rates.collectives.line(op, group.size) if rates.collectives and group.nodes == 1 else None
    if line:
        each_s = rates.call_s if at_once else rates.slower * line.call_s
        return longer * (rates.slower * size_bytes * line.byte_s + calls * each_s)
    link = rates.link_reduce if op == "all_reduce" and group.per_node >= 8 else rates.link
    inside = sent_bytes(op, size_bytes, group.size) / link if group.per_node > 1 else 0.0
    outside = 0.0
    if group.nodes > 1:
        # each rank of a node sends a different part of the tensor, over its own share of the network
        if op == "all_to_all":
            outside = size_bytes * (group.size - group.per_node) / group.size / rates.network
        else:
            outside = sent_bytes(op, size_bytes, group.nodes) / group.per_node / rates.network
    # both kinds of rings move chunks at the same time, so only the slower kind counts
    return longer * (max(inside, outside) + calls * call_s(op, group, rates))


def call_s(op: str, group: RankGroup, rates: Rates) -> float:
    """Return the latency of one call in seconds."""
    # a ring passes through all ranks of every node; all-reduces use a tree
    steps, network_steps = group.size - group.nodes, group.nodes - 1
    if op == "all_reduce":
        steps, network_steps = 2 * (group.per_node - 1).bit_length(), 2 * (group.nodes - 1).bit_length()
    return rates.call_s + steps * rates.hop_s + network_steps * rates.network_hop_s
