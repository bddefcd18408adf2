"""Events as whoever listens gets them."""

from __future__ import annotations

import doctest

from zerofit.spec import events


def test_a_status_is_told_once():
    heard = []
    report = events.Reporter(lambda event: heard.append(event.text))
    for text in ("starting", "starting", "5 steps", "starting"):
        report.status(text)
    assert heard == ["starting", "5 steps", "starting"]
    assert doctest.testmod(events).failed == 0
