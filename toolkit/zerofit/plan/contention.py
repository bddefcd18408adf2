"""Model work at the same time: overlapping work is slower, and pauses make everything wait."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerofit.plan.time import Stream

SAME_MOMENT_S = 1e-12  # tolerance for sums in another order


class Piece(NamedTuple):
    """A span of work, before it is placed in the step.

    Times count from the start of the forward or backward, as if no other work slowed this piece.
    """

    stream: Stream
    module: str
    kind: str
    start_s: float
    end_s: float
    bytes: float
    flops: float = 0.0


# Pieces are first placed on a timeline as if links and device did not slow each other. Then time is stretched: while
# both are busy, a second of this timeline takes (1 + exposed) real seconds.
#
#     timeline  links   [======]    [===]          real   links   [=========]    [===]
#               device     [==========]                   device      [=============]
#                          ^^^  ^^ both busy: stretched
#
# Real time is therefore piecewise linear in the time of this timeline. This is the same model as `flow_s`
# in closed form.
class Clock:
    """Converts times without contention to real times.

    While links and compute are both busy, both are slower. During a pause, only the piece that causes the pause
    runs.
    """

    def __init__(self, exposed: float):
        self._exposed = exposed
        self._edges: list[tuple[float, int, int]] = []  # when links (0) or compute (1) begin (+1) and end (-1)
        self._pauses: list[tuple[float, Piece]] = []

    def link(self, start_s: float, end_s: float) -> None:
        """Mark the links as busy."""
        self._edges += [(start_s, 0, 1), (end_s, 0, -1)]

    def compute(self, start_s: float, end_s: float) -> None:
        """Mark the device as busy: it computes, or waits for a layer's collective."""
        self._edges += [(start_s, 1, 1), (end_s, 1, -1)]

    def pause(self, at_s: float, piece: Piece) -> None:
        """Make all other work wait for a piece. Calls must be in order of time."""
        self._pauses.append((at_s, piece))

    def placed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces, including pauses, at their real times. Interrupted pieces are split."""
        points = list(self._points())
        placed = []
        for piece in pieces:
            length_s = piece.end_s - piece.start_s
            if length_s <= 0.0:
                continue
            cuts = [at for at, _ in self._pauses if piece.start_s + SAME_MOMENT_S < at < piece.end_s - SAME_MOMENT_S]
            for start_s, end_s in pairwise([piece.start_s, *cuts, piece.end_s]):
                share = (end_s - start_s) / length_s
                start_s = _real(points, start_s) + self._paused(start_s, 1)
                end_s = _real(points, end_s) + self._paused(end_s, -1)
                amounts = {"bytes": share * piece.bytes, "flops": share * piece.flops}
                placed.append(piece._replace(start_s=start_s, end_s=end_s, **amounts))
        for at, piece in self._pauses:
            start_s = _real(points, at) + self._paused(at, -1)
            placed.append(piece._replace(start_s=start_s, end_s=start_s + piece.end_s))
        return placed

    def _paused(self, at_s: float, side: int) -> float:
        """Return the seconds of pauses before a moment; with `side` 1, also of one at the moment."""
        return sum(piece.end_s for at, piece in self._pauses if at < at_s + side * SAME_MOMENT_S)

    def _points(self) -> Iterator[tuple[float, float]]:
        """Yield moments with their real times. Between two moments, real time is linear."""
        busy, before_s, real_s = [0, 0], 0.0, 0.0
        yield 0.0, 0.0
        for at_s, which, change in sorted(self._edges):
            real_s += (at_s - before_s) * (1 + self._exposed if all(busy) else 1.0)
            busy[which] += change
            if at_s > before_s:
                yield at_s, real_s
            before_s = at_s


def _real(points: Sequence[tuple[float, float]], at_s: float) -> float:
    """Return the real time of `at_s`, between two of `points` or on a line through the last two."""
    after_index = min(max(1, bisect_right(points, (at_s, math.inf))), len(points) - 1)
    (before_s, before), (after_s, after) = points[after_index - 1], points[after_index]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)
