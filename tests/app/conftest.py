"""The process that simulations start from, which imports for seconds, serves all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def server_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trainings in this process leave it running."""
    from zerofit.app.training import memory_gate

    monkeypatch.setattr(memory_gate, "end_server", lambda: None)
