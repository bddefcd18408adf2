"""ZeRO 1 and 2 cut each flat group of parameters into one partition a rank: which parameters reach into which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class FlatGroup(NamedTuple):
    """Parameters that lie one after the other in a flat buffer, which `sharing` ranks divide."""

    numels: Sequence[int]
    partition: int  # elements, padded
    sharing: int  # of spread experts those ranks that hold the same ones


def reaching(groups: Iterable[FlatGroup], ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranks with the parameters that reach into their partitions: all elements of each, and those inside.

    >>> list(reaching([FlatGroup([6, 2], 4, 2)], 2))
    [(0, 6, 4), (1, 6, 2), (1, 2, 2)]
    """
    for numels, size, sharing in groups:
        start, beside = 0, ranks // sharing  # neighbours hold other experts, and the same part of theirs
        for numel in numels:
            end = start + numel
            for part in range(start // size, (end - 1) // size + 1):
                piece = min(end, (part + 1) * size) - max(start, part * size)
                for rank in range(part * beside, (part + 1) * beside):
                    yield rank, numel, piece
            start = end
