"""ZeRO 1 and 2 cut each flat group of parameters into one partition a rank: which parameters reach into which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
