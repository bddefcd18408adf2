"""The watch hears guards over real connections, and nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing

import pytest

from zerofit.watch.json_lines import ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import LaunchSpec, as_argument, from_argument, rank_of
from zerofit.watch.supervise import Watch

BEAT = {"step": 3, "phase": "forward", "training": True, "still_s": 0.1, "silent_s": 0.1, "cpu_s": 1.0}


def spec(port, **changes):
    known = {
        "folder": "/run",
        "token": "secret",
        "run_id": "m",
        "coming_s": 9.0,
        "attempt": 1,
        "hosts": ("a", "b"),
        "accelerator": "cpu",
    }
    known |= {"watch": {"a": ("127.0.0.1", port), "b": ("127.0.0.1", port)}, "master": ("127.0.0.1", 1)}
    return LaunchSpec(**{**known, "timeout_s": 5.0, **changes})


@pytest.fixture
def watch():
    with closing(Watch("127.0.0.1")) as one:
        one.expect(spec(one.port))
        yield one


def guard(watch, rank, token="secret"):
    wire = JsonLineSocket(socket.create_connection(("127.0.0.1", watch.port)), 5.0)
    wire.send({"hello": token, "rank": rank})
    return wire


def until(watch, done):
    deadline = time.monotonic() + 5
    while not done() and time.monotonic() < deadline:
        watch.poll(0.05)
    assert done()


def received(watch, wire):
    found = []
    deadline = time.monotonic() + 5
    while not found and time.monotonic() < deadline:
        watch.poll(0.02)
        found += wire.receive()
    return found


def test_ranks_come_beat_and_end(watch):
    first, second = guard(watch, 0), guard(watch, 1)
    until(watch, lambda: all(s.here for s in watch.states))
    assert watch.summary() == ""
    first.send({"beat": BEAT})
    until(watch, lambda: watch.states[0].beat)
    assert watch.states[0].where == "step 4, forward"
    first.send({"ended": 0, "last": {}})
    ending = threading.Thread(target=first.finish, args=(5,))  # with an answer to the beat unread
    ending.start()
    second.send({"ended": 3, "last": {"step": 7}, "failure": {"rank": 1, "problems": []}})
    until(watch, lambda: watch.states[1].ended is not None)
    until(watch, lambda: not ending.is_alive())
    assert (watch.states[0].ended, watch.states[0].lost) == (0, False)
    assert watch.states[1].failure == {"rank": 1, "problems": []}
    assert watch.verdict().ranks == (1,)


def test_a_guard_that_is_gone_without_a_word(watch):
    wire = guard(watch, 1)
    until(watch, lambda: watch.states[1].here)
    assert "1 of 2" in watch.summary()
    wire.close()
    until(watch, lambda: watch.states[1].lost)
    assert watch.verdict().problem.kind == "vanished"


@pytest.mark.parametrize("hello", ["wrong", "", None])
def test_strangers_are_not_heard(watch, hello):
    wire = guard(watch, 0, token=hello)
    with pytest.raises(ConnectionLost):
        while True:
            watch.poll(0.05)
            list(wire.receive())
    assert not watch.states[0].here


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"{}\n", b'{"hello": "secret", "rank": 9}\n'])
def test_noise_is_not_heard(watch, noise):
    with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
        stranger.sendall(noise)
        for _ in range(10):
            watch.poll(0.02)
        stranger.settimeout(2)
        assert stranger.recv(10) == b""
    assert not any(s.here for s in watch.states)


def test_a_rank_reports_once(watch):
    first = guard(watch, 0)
    until(watch, lambda: watch.states[0].here)
    second = guard(watch, 0)
    with pytest.raises(ConnectionLost):
        while True:
            watch.poll(0.05)
            list(second.receive())
    first.send({"beat": BEAT})
    until(watch, lambda: watch.states[0].beat)


def test_orders_to_the_guards(watch):
    wire = guard(watch, 0)
    until(watch, lambda: watch.states[0].here)
    wire.send({"beat": BEAT})
    assert received(watch, wire) == [{"heard": True}]
    watch.send_all({"do": "stacks"})
    assert received(watch, wire) == [{"do": "stacks"}]
    wire.close()
    assert watch.stop()


def test_lines_come_whole_however_they_are_cut():
    left, right = socket.socketpair()
    wire = JsonLineSocket(right, 5.0)
    data = b"".join(json.dumps({"n": n, "text": "ä" * n}).encode() + b"\n" for n in range(40))
    found = []
    for start in range(0, len(data), 7):
        left.sendall(data[start : start + 7])
        found += wire.receive()
    assert [one["n"] for one in found] == list(range(40))
    left.close()
    with pytest.raises(ConnectionLost):
        list(wire.receive())


def test_orders_are_a_file_that_only_the_owner_reads(tmp_path):
    path = tmp_path / "a $(touch x) 'b'\n" / "launch_spec.json"
    path.parent.mkdir()
    written = spec(1, environment={"A": "'$(x)\n"}, interfaces={"a": "eth0"})
    written.write(path)
    assert path.stat().st_mode & 0o077 == 0
    assert LaunchSpec.read(path) == written
    word = as_argument(path)
    assert word.replace("-", "").replace("_", "").isalnum()
    assert from_argument(word) == path


def test_who_says_which_rank_this_is():
    assert rank_of({"RANK": "3", "LOCAL_RANK": "1", "SLURM_PROCID": "9"}) == (3, 1)
    assert rank_of({"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}) == (5, 1)
    assert rank_of({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}) == (2, 0)
    with pytest.raises(KeyError, match="no launcher"):
        rank_of({})
