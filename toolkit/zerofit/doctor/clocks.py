"""Clocks of hosts against this side's."""

from __future__ import annotations

from zerofit.doctor.check import FAIL, WARN, Check, check

WARN_S, FAIL_S = 2.0, 60.0  # logs are ordered by time; builds on a shared file system go by it too


def clock(host: str, difference_s: float, error_s: float) -> Check:
    """Its clock against this side's; what the way there leaves open does not count against it."""
    sure = max(0.0, abs(difference_s) - error_s)
    words = f"{abs(difference_s):.3g} s {'ahead' if difference_s > 0 else 'behind'} (±{error_s:.1g} s)"
    problem = words if sure > WARN_S else ""
    status, hint = FAIL if sure > FAIL_S else WARN, "let chrony or systemd-timesyncd run there"
    return check("clock", host, problem, words, status, expected=f"within {WARN_S:g} s", hint=hint)
