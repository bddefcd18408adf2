"""Compute the bytes that each rank sends in a collective, and its seconds."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.plan.rates import Rates

# bytes that each of n ranks sends for a tensor of one byte, with ring algorithms
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0 if n > 1 else 0.0,
}


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
