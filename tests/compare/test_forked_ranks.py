"""Ranks of a row: processes of their own, forked from one that has imported once what all of them need."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import psutil
import pytest

from zerofit.app.comparing import processes
from zerofit.app.comparing.processes import SERVER, one_server
from zerofit.app.comparing.rows import status_of
from zerofit.compare.job import CompareJob

JOB = CompareJob(strategy="ddp", model="mlp", data="digits", ranks=2, global_batch=16, steps=8, eval_samples=50)
START = processes.start_rank


class Watched:
    """Runs jobs, and knows the processes of their ranks."""

    def __init__(self, folder):
        self.folder, self.started, self.after = folder, [], lambda pid: None

    def start(self, *request):
        rank = START(*request)
        self.started.append(rank.pid)
        self.after(rank.pid)
        return rank

    def run(self, job=JOB):
        self.started.clear()
        return processes.run_job(job, self.folder / job.strategy, lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def server(cache):
    with one_server():
        yield


@pytest.fixture
def watched(tmp_path, monkeypatch):
    made = Watched(tmp_path)
    monkeypatch.setattr(processes, "start_rank", made.start)
    return made


def servers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if SERVER in one.cmdline()]


def test_ranks_are_processes_of_their_own_and_imports_happen_once(watched):
    parents: list[int] = []
    watched.after = lambda pid: parents.append(psutil.Process(pid).ppid())
    for strategy in ("ddp", "data-parallel"):
        assert status_of(watched.run(replace(JOB, strategy=strategy))) == ("ok", None)
        assert len(set(watched.started)) == 2
        assert not any(map(psutil.pid_exists, watched.started))
    (server,) = servers()
    assert parents == [server.pid] * 4


def test_a_rank_that_dies_gives_a_failed_row(watched):
    watched.after = lambda pid: len(watched.started) == 2 and os.kill(pid, signal.SIGKILL)
    status, reason = status_of(watched.run())
    assert status == "failed"
    assert reason.startswith("process 1 exited with code -9")
    assert not any(map(psutil.pid_exists, watched.started))


def test_what_a_rank_says_is_in_its_log(watched):
    status, reason = status_of(watched.run(replace(JOB, data="no-such")))
    assert status == "failed" and reason.startswith("UserError: ")
    for rank in range(2):
        assert reason in (watched.folder / "ddp" / f"rank-{rank}.log").read_text()


def test_without_the_server_a_row_fails_and_the_next_one_has_another(watched):
    def end_server(_):
        (one,) = servers()
        one.kill()
        one.wait()
        watched.after = lambda pid: None

    watched.after = end_server
    status, reason = status_of(watched.run())
    assert (status, reason.partition(":")[0]) == ("failed", "process 0 exited with code -9")
    assert status_of(watched.run()) == ("ok", None)
    assert len(servers()) == 1


def test_libraries_of_the_start_are_not_what_a_rank_grows_by(watched):
    """A forked process begins without pages of files, and would count torch's own as what its model takes."""
    (word,) = watched.run(replace(JOB, strategy="single", ranks=1))
    (server,) = servers()
    assert word["host_bytes"] > server.memory_info().rss
    assert 0 < word["peak_bytes"] < 60 << 20


def test_one_comparison_within_another_shares_its_server():
    before = servers()
    with one_server():
        assert servers() == before
    assert servers() == before
