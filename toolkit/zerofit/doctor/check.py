"""One line of a table of checks."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of one host: what was found, what was expected, and how to fix a problem."""

    name: str  # stable slug: "ssh", "versions", "run-folder", ...
    host: str
    status: str  # OK, WARN or FAIL
    value: str  # what was found
    expected: str = ""
    hint: str = ""  # how to fix it
    figure: float | None = None  # the measured value in bytes, bytes/s, FLOP/s or seconds
    source: str = ""  # source of the expected value


def check(
    name: str, host: str, problem: str, good: str, status: str = FAIL, expected: str = "", hint: str = ""
) -> Check:
    """Return a check. If `problem` is empty, its value is `good` and its status OK.

    Otherwise they are `problem` and `status`.
    """
    return Check(
        name=name,
        host=host,
        status=status if problem else OK,
        value=problem or good,
        expected=expected,
        hint=hint if problem else "",
    )
