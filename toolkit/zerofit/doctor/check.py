"""One line of a table of checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of one host: what was looked at, what was found, and how to mend it."""

    name: str  # stable slug: "ssh", "versions", "run-folder", ...
    host: str
    status: str  # OK, WARN or FAIL
    value: str  # what was found
    expected: str = ""
    hint: str = ""  # how to mend it
    figure: float | None = None  # a measured value in bytes, FLOP or elements a second, or seconds
    source: str = ""  # of what is expected

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


def check(
    name: str,
    host: str,
    problem: str,
    good: str,
    status: str = FAIL,
    expected: str = "",
    hint: str = "",
    *,
    figure: float | None = None,
    source: str = "",
) -> Check:
    """Return a check that is well where there is no problem; with one it has this status and hint."""
    return Check(
        name=name,
        host=host,
        status=status if problem else OK,
        value=problem or good,
        expected=expected,
        hint=hint if problem else "",
        figure=figure,
        source=source,
    )
