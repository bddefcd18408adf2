"""A cache of its own for every test, and short ways to open data and to see its errors."""

from __future__ import annotations

import pytest

from zerofit.data.opening import open_data
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZEROFIT_CACHE", str(folder))
    return folder


@pytest.fixture
def opened():
    def open_(task="causal-lm", seq_len=None, **fields):
        return open_data(Run(**fields), task, seq_len, Reporter())

    return open_


@pytest.fixture
def refused(opened):
    """The problems of data that must not open."""

    def refuse(*args, **fields):
        with pytest.raises(UserError) as caught:
            opened(*args, **fields)
        return caught.value.problems

    return refuse
