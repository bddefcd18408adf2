"""20 public threads: the cause is the one that the thread found, or "unknown" with what to run next."""

from __future__ import annotations

import pytest

from tests.explain.threads import THREADS, Thread
from zerofit.explain.from_log import explain_log
from zerofit.explain.log import lines_of


@pytest.mark.parametrize("thread", THREADS, ids=[thread.number for thread in THREADS])
def test_the_cause_of_a_public_thread(thread: Thread):
    found = explain_log(lines_of(thread.log))
    assert found is not None and found.cause == (thread.found or "unknown"), found
    assert found.changes or found.run_next


def test_twenty_threads_of_which_few_are_unknown():
    assert len(THREADS) == 20 and sum(bool(thread.found) for thread in THREADS) == 16
