"""How DeepSpeed puts parameters and gradients together: ZeRO's partitions, and the buckets of an all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

ALLREDUCE_ELEMENTS = 500_000_000  # of a bucket without ZeRO (runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)


def reaching(numels: Sequence[int], partition: int, beside: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranks with the parameters that reach into their partitions: the place of each, and its elements inside.

    Args:
        numels: the elements of parameters that lie one after the other in a flat buffer.
        partition: elements of a partition, padded.
        beside: neighbours that have the same partition of theirs: 1, or as many as hold spread experts together.

    >>> list(reaching([6, 2], 4, 1))
    [(0, 0, 4), (1, 0, 2), (1, 1, 2)]
    """
    start = 0
    for place, numel in enumerate(numels):
        end = start + numel
        for part in range(start // partition, (end - 1) // partition + 1):
            piece = min(end, (part + 1) * partition) - max(start, part * partition)
            for rank in range(part * beside, (part + 1) * beside):
                yield rank, place, piece
        start = end


def largest_bucket(numels: Iterable[int]) -> int:
    """Count the elements of the largest bucket without ZeRO: it is full once beyond the limit (engine.py:3834).

    >>> largest_bucket([300_000_000, 300_000_000, 100_000_000])
    600000000
    """
    largest = filled = 0
    for numel in numels:
        filled += numel
        largest = max(largest, filled)
        filled = 0 if filled > ALLREDUCE_ELEMENTS else filled
    return largest
