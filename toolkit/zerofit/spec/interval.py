"""How often something is done: every so many optimizer steps, or every so many minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """`500` (steps), `30min`, `2h`, `90s`; `0` is never."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)\s*(s|min|h)?", text.strip())
        if not match or (match[2] and not int(match[1])):
            raise ValueError("not an interval: give optimizer steps (500), a time (90s, 30min, 2h), or 0 for never")
        number, unit = int(match[1]), match[2]
        return cls(seconds=number * SECONDS[unit]) if unit else cls(steps=number)

    @property
    def never(self) -> bool:
        """Whether it is never done."""
        return self.steps == 0
