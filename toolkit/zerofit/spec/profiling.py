"""Profiling of a run: numbers of steps and ranks, and marks in torch.profiler's traces."""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP_MARK = "zerofit step "  # followed by the step's number (from 1); lasts as long as the step
SECTION_MARK = "zerofit section|"  # followed by phase|module, up to the next mark


@dataclass(frozen=True)
class Numbers:
    """Numbers and ranges of numbers: "7", "3-5", "0,8-11"."""

    ranges: tuple[range, ...]

    @classmethod
    def parse(cls, text: str) -> Numbers:
        """Parse numbers and ranges. Raises ValueError.

        >>> numbers = Numbers.parse("3-5,9")
        >>> 4 in numbers, 6 in numbers, numbers.last
        (True, False, 9)
        """
        ranges = []
        for word in text.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", word)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if last < first:
                raise ValueError("not numbers and ranges, like 3-5 or 0,8")
            ranges.append(range(first, last + 1))
        return cls(tuple(ranges))

    def __contains__(self, number: int) -> bool:
        return any(number in numbers for numbers in self.ranges)

    @property
    def last(self) -> int:
        """The largest number of all ranges."""
        return max(numbers[-1] for numbers in self.ranges)
