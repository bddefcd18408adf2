"""20 public threads: the cause is the one that the thread found, or "unknown" with what to run next."""

from __future__ import annotations

import pytest

from tests.explain.threads import RECENT, THREADS, Thread
from zerofit.explain.from_log import explain_log
from zerofit.explain.log import lines_of


@pytest.mark.parametrize("thread", THREADS, ids=[thread.number for thread in THREADS])
def test_the_cause_of_a_public_thread(thread: Thread):
    found = explain_log(lines_of(thread.log))
    assert found is not None and found.cause == (thread.found or "unknown"), found
    assert found.changes or found.run_next


def test_twenty_threads_of_which_few_are_unknown():
    assert len(THREADS) == 20 and sum(bool(thread.found) for thread in THREADS) == 16


@pytest.mark.parametrize(("number", "log", "cause", "next_word"), RECENT, ids=[thread[0] for thread in RECENT])
def test_messages_of_2025_and_2026_are_answered_with_their_devices_tools(
    number: str, log: str, cause: str, next_word: str
):
    found = explain_log(lines_of(log))
    assert found is not None and found.cause == cause, found
    advice = " ".join([found.run_next, *(change.change for change in found.changes)])
    assert next_word in advice
    if next_word in ("rocm-smi", "xpu-smi", "torch.mps"):  # nvidia-smi and a snapshot by CUDA would not run there
        assert "nvidia-smi" not in advice and "torch.cuda" not in advice and "ZeRO" not in advice


def test_an_error_of_the_driver_without_a_traceback_blames_nobody():
    for log in ("torch.AcceleratorError: CUDA error: out of memory", "Error out of memory at line 351 in file x.c"):
        found = explain_log(lines_of(log))
        assert found is not None and not found.is_known and found.run_next


def test_figures_of_ray_and_of_a_mac():
    ray = explain_log(
        lines_of(
            "Memory on the node (ID: fc2b) where the task (actor ID: f9, pid=4331, memory used=2.00GB) was "
            "running was 59.50GB / 62.50GB (0.95), node running low on memory"
        )
    )
    assert ray is not None and ray.figures is not None and ray.figures.process_bytes == 2 << 30
    assert ray.evidence[0] == "all processes of the host used 59.5 GiB of 62.5 GiB"
    mac = explain_log(lines_of(next(log for number, log, *_ in RECENT if number == "Comfy-Org/ComfyUI#7440")))
    assert mac is not None and mac.figures is not None
    figures = mac.figures
    assert figures.total_bytes == sum((figures.free_bytes or 0, figures.reserved_bytes or 0, figures.beside_bytes or 0))
