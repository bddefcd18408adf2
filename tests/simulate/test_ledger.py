"""Peaks and timeline of a short ledger, reckoned by hand."""

from __future__ import annotations

import pytest

from zerofit.simulate.memory.ledger import DEVICE, HOST, Ledger, Storage, kind_peaks, timeline


@pytest.fixture
def ledger() -> Ledger:
    """A parameter that is gathered in forward, freed, and gathered again in backward beside a gradient."""
    ledger = Ledger()
    ledger.begin("forward", 0)
    gathered = ledger.allocated(stored(100))
    ledger.resized(gathered, 0)
    ledger.begin("backward", 0)
    ledger.allocated(stored(30, HOST))
    ledger.allocated(stored(20))
    ledger.resized(gathered, 100)
    return ledger


def stored(size: int, place: str = DEVICE) -> Storage:
    return Storage(size, place, "forward", 0, "op", f"on the {place}", stored.__code__, 1)


def test_a_peak_is_in_the_phase_in_which_a_storage_grows_again(ledger):
    found = kind_peaks(ledger)
    assert [(peak.which, peak.phase, peak.bytes) for peak in found if peak.bytes > 100] == [
        ("", "backward", 120),
        ("last", "backward", 120),
    ]
    assert {peak.bytes for peak in found if peak.phase == "forward"} == {100}


def test_a_timeline_names_lines_that_allocate_on_the_device(ledger):
    points = timeline(ledger)
    assert [(point.t, point.phase, sum(point.bytes.values())) for point in points] == [
        (0, "forward", 100),
        (1, "forward", 0),
        (2, "backward", 0),
        (3, "backward", 20),
        (4, "backward", 120),
    ]
    assert [point.module for point in points] == ["on the device", "", "", "on the device", "on the device"]
