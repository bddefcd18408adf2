"""Parsing and formatting of sizes and intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zerofit.spec.errors import Problem, UserError

MOST_RANKS = 2**18  # as in the largest clusters; a plan for so many needs 10 s and 1 GB
MOST_BYTES = 2**63 - 1  # signed 64-bit: 8 EiB
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_COUNTS = ("", "K", "M", "B", "T")  # thousands to trillions
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str, where: str) -> int:
    """Parse "80GiB", "1TB", "512m" or a plain number to bytes. Raises UserError."""
    found = _SIZE.match(text)
    value = 0
    if found:
        number, prefix, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()]
        value = int(size) if size <= MOST_BYTES else 0
    if value <= 0:
        hint = "write it like 80GiB (1024^3), 1TB (1000^4) or in bytes, below 8 EiB"
        raise UserError(Problem(kind="bad-size", message=f"{text!r} is not a valid size", hint=hint, where=where))
    return value


def shown_rate(value: float) -> str:
    """Format a number with three digits; numbers from 100 on have no fraction."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown_count(value: float) -> str:
    """Format a large number with three digits and a unit.

    >>> shown_count(671e9), shown_count(1.0264e12), shown_count(1_820_000), shown_count(950)
    ('671 B', '1.03 T', '1.82 M', '950')
    """
    power = 0
    while value >= 999.5 and power < len(_COUNTS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_COUNTS[power]}".rstrip()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the right form.

    >>> counted(1, "rank"), counted(4096, "step"), counted(0, "process")
    ('1 rank', '4,096 steps', '0 processes')
    """
    ending = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others: "a, b and 3 more"."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def shown_score(value: float) -> str:
    """Format a loss, a perplexity or an accuracy with three digits: "1.84", "0.0971", "128,000"."""
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def shown_seconds(value: float | None) -> str:
    """Format seconds with three digits: "0.125 s"; "" for None."""
    return "" if value is None else f"{value:.3g} s"


def shown_bytes(value: float, unit_of: float | None = None) -> str:
    """Format bytes with three digits and a binary unit: "79.1 GiB".

    `unit_of`: use the unit of this number of bytes.
    """
    scale = value if unit_of is None else unit_of
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(scale) < 999.5 or unit == "TiB":
            break
        value, scale = value / 1024, scale / 1024
    # The limits are half a last digit below 100, 10 and 1000, so that rounding does not add a digit.
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 2 if abs(value) < 9.995 else 1
    return f"{value:.{digits}f} {unit}"


SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """An interval: 500 (steps), 30min, 2h or 90s; 0 means never."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse an interval. Raises ValueError."""
        match = re.fullmatch(r"(\d+)\s*(s|min|h)?", text.strip())
        if not match or (match[2] and not int(match[1])):
            raise ValueError("not an interval; give optimizer steps (500), a time (90s, 30min, 2h), or 0 for never")
        number, unit = int(match[1]), match[2]
        return cls(seconds=number * SECONDS[unit]) if unit else cls(steps=number)

    @property
    def never(self) -> bool:
        """Whether the interval is 0, so that nothing is ever due."""
        return self.steps == 0
