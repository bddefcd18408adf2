"""Sizes as people write and read them."""

from __future__ import annotations

import re

from zerofit.spec.errors import Problem, UserError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str, where: str) -> int:
    """Bytes of "80GiB", "1TB", "512m" or a plain number. Raises UserError."""
    found = _SIZE.match(text)
    value = 0
    if found:
        number, prefix, binary = found.groups()
        value = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])
    if value <= 0:
        hint = "write it like 80GiB (1024^3), 1TB (1000^4), or in bytes"
        raise UserError(Problem(kind="bad-size", message=f"{text!r} is not a valid size", hint=hint, where=where))
    return value


def shown_bytes(value: float) -> str:
    """Three digits and a binary unit: "79.1 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {unit}"
