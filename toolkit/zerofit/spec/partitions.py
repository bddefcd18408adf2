"""ZeRO's partitions, and DeepSpeed's buckets of an all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

ALLREDUCE_ELEMENTS = 500_000_000  # per bucket without ZeRO (runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)


def partition_overlaps(numels: Sequence[int], partition: int, neighbors: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, index of a parameter, and its elements in the rank's partition, if any.

    Args:
        numels: the elements of consecutive parameters in a flat buffer.
        partition: elements of a partition, with padding.
        neighbors: number of consecutive ranks whose partitions cover the same elements of their buffers. For
            experts, it is the expert parallel degree, since each of these ranks has different experts of the same
            sizes. For other parameters, it is 1.

    >>> list(partition_overlaps([6, 2], 4, 1))
    [(0, 0, 4), (1, 0, 2), (1, 1, 2)]
    """
    start = 0
    for index, numel in enumerate(numels):
        end = start + numel
        for part in range(start // partition, (end - 1) // partition + 1):
            overlap = min(end, (part + 1) * partition) - max(start, part * partition)
            for rank in range(part * neighbors, (part + 1) * neighbors):
                yield rank, index, overlap
        start = end


def buckets(numels: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield elements and number of gradients of each bucket without ZeRO.

    A single gradient is reduced in place; several gradients are copied into one buffer first.

    >>> list(buckets([600_000_000, 300_000_000, 300_000_000, 100_000_000]))
    [(600000000, 1), (600000000, 2), (100000000, 1)]
    """
    filled = count = 0
    for numel in numels:
        filled, count = filled + numel, count + 1
        if filled > ALLREDUCE_ELEMENTS:  # ends with the gradient that exceeds the limit (runtime/engine.py:3834)
            yield filled, count
            filled = count = 0
    if count:
        yield filled, count
