"""What a trial's command has said becomes its status."""

from __future__ import annotations

import pytest

from zerofit.app.tuning.trial import _why


@pytest.mark.parametrize(
    ("error", "late", "status"),
    [
        ({"kind": "does-not-fit", "message": "gpt2 needs 9 GiB"}, False, "does-not-fit"),
        ({"kind": "out-of-memory", "message": "rank 0"}, False, "oom"),
        ({"kind": "hang", "message": "rank 1"}, False, "hang"),
        ({}, False, "crash"),
        ({"kind": "does-not-fit", "message": "gpt2 needs 9 GiB"}, True, "stopped"),
    ],
)
def test_how_a_trial_ended(error, late, status):
    found, reason = _why(1, error, late)
    assert found == status
    assert late or reason == error.get("message", "it ended with exit code 1")
