"""The rendezvous of a launcher's processes, over a real store: here each is a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from zerofit.launch import rendezvous as module
from zerofit.launch.local import free_port
from zerofit.launch.rendezvous import Rendezvous
from zerofit.launch.world import World
from zerofit.spec.errors import RunFailed, UserError


def world(rank, port, **changes):
    return World(launcher="mpirun", rank=rank, size=3, local_rank=rank, master=("127.0.0.1", port), **changes)


def member(rank, port):
    """What a process hears that is not the first."""
    here, heard = Rendezvous(world(rank, port)), []
    here.report({"rank": rank})
    for order in here.orders():
        heard.append(order)
        if "see" in order:
            here.answer("" if rank == 1 else "not there")
        else:
            here.leave()
            return heard
    return heard


def test_processes_report_answer_and_leave():
    port, said = free_port(), list[str]()
    with ThreadPoolExecutor(2) as pool:
        first = Rendezvous(world(0, port))
        others = [pool.submit(member, rank, port) for rank in (1, 2)]
        first.report({"rank": 0})
        assert first.reports(said.append) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        first.order(see="/run")
        assert first.answers() == {1: "", 2: "not there"}
        first.dismiss(2)
        assert [other.result(10) for other in others] == [[{"see": "/run"}, {"exit": 2}]] * 2
    with pytest.raises(UserError, match="another MASTER_PORT"):
        Rendezvous(world(0, port))


def test_processes_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.1)
    port, said = free_port(), list[str]()
    first = Rendezvous(world(0, port))
    first.report({})
    with pytest.raises(RunFailed, match=r"2 of 3 processes \(rank 1, 2\) did not report"):
        first.reports(said.append)
    assert said
    with pytest.raises(RunFailed, match="rank 1 cannot reach rank 0"):
        Rendezvous(world(1, free_port()))


def test_a_restart_finds_what_the_start_before_has_kept_and_nothing_else():
    port = free_port()
    server = Rendezvous(world(0, port))  # in place of torchrun
    first = Rendezvous(world(0, port, agent_store=True))
    first.report({})
    first.keep("folder", "/run")
    first.order(exit=0)
    again = Rendezvous(replace(world(0, port), agent_store=True, attempt=2))
    assert again.kept("folder") == "/run"
    assert not again._store.check(["rank-0"]) and not again._store.check(["order-0"])
    assert server.kept("folder") is None
