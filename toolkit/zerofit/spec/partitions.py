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


def buckets(numels: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the elements and the number of gradients of each bucket without ZeRO: full once beyond the limit.

    (runtime/engine.py:3834) Of several gradients a flat copy is made; one alone is reduced where it lies.

    >>> list(buckets([600_000_000, 300_000_000, 300_000_000, 100_000_000]))
    [(600000000, 1), (600000000, 2), (100000000, 1)]
    """
    filled = count = 0
    for numel in numels:
        filled, count = filled + numel, count + 1
        if filled > ALLREDUCE_ELEMENTS:
            yield filled, count
            filled = count = 0
    if count:
        yield filled, count
