"""The watch hears guards over real connections, and nobody else."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import threading
import time
from contextlib import closing, suppress

import pytest

from zerofit.app.clusters.hosts import HostRequest, listening_address
from zerofit.launch.host import address_to
from zerofit.launch.hostfile import Host
from zerofit.watch.json_lines import ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import LaunchSpec, as_argument, from_argument, rank_of
from zerofit.watch.rank_guard import RankGuard
from zerofit.watch.supervise import MESSAGE, STRANGERS, Hello, Watch

BEAT = {"step": 3, "phase": "forward", "training": True, "still_s": 0.1, "silent_s": 0.1, "cpu_s": 1.0}
BEAT |= {"warm": True, "collective": "all_reduce", "at": "train/loop.py:9", "resending": False, "state": "running"}
BEAT |= {"longest_still_s": 0.1}
FAILURE = {"rank": 1, "time_s": 1.5, "problems": [{"kind": "nan", "message": "loss", "hint": "", "where": ""}]}


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
    assert watch.states[0].where == "step 4, forward, in all_reduce"
    first.send({"ended": 0, "last": {}})
    ending = threading.Thread(target=first.finish, args=(5,))  # with an answer to the beat unread
    ending.start()
    second.send({"ended": 3, "last": {"step": 7}, "failure": FAILURE})
    until(watch, lambda: watch.states[1].ended is not None)
    until(watch, lambda: not ending.is_alive())
    assert (watch.states[0].ended, watch.states[0].lost) == (0, False)
    assert watch.states[1].failure == FAILURE
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


def test_a_start_counts_from_when_it_is_expected(watch, monkeypatch):
    """Ops are compiled for minutes between the making of a watch and the start: no time was lost by a stop."""
    monkeypatch.setattr(watch, "_polled", time.monotonic() - 1000)
    watch.expect(spec(watch.port))
    watch.poll(0.01)
    assert all(state.heard <= time.monotonic() for state in watch.states)


def test_the_last_heartbeat_names_where_a_rank_ended(watch):
    wire = guard(watch, 0)
    wire.send({"beat": BEAT})
    wire.send({"ended": 1, "last": {**{k: BEAT[k] for k in ("step", "training")}, "phase": "step", "collective": None}})
    until(watch, lambda: watch.states[0].ended == 1)
    assert watch.states[0].where == "step 4, step"


def test_a_guard_that_was_stopped_has_heard_its_rank_at_most_now():
    """It adds the time of its stop to when it heard its rank last, which may have been after it looked at the clock."""
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as process, closing(os.fdopen(reading)), closing(os.fdopen(writing, "w")):
        one = RankGuard(spec(1), 0, process, reading)
        one._heard = time.monotonic() + 0.09
        assert MESSAGE.validate_python({"beat": one._beat()}).beat.silent_s == 0.0
        process.kill()


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


def test_ranks_have_ended_once_their_guards_say_so(watch):
    """Guards that a launcher of the user's has started stay connected, for the exit code of the run."""
    first, second = guard(watch, 0), guard(watch, 1)
    until(watch, lambda: all(s.here for s in watch.states))
    first.send({"ended": 0, "last": {}})
    second.send({"ended": -9, "last": {}})
    until(watch, lambda: all(s.ended is not None for s in watch.states))
    began = time.monotonic()
    watch.await_failures()
    assert watch.stop()
    assert time.monotonic() - began < 1
    watch.send_all({"code": 75})
    assert {"code": 75} in received(watch, second)


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


@pytest.mark.parametrize(("timeout_s", "idle_s"), [(60.0, 15), (1e6, 32_767), (0.5, 1)])
def test_the_longest_timeout_of_a_run_is_a_valid_timeout_of_tcp(timeout_s, idle_s):
    """Above 131,071 s the kernel refused the option, and no rank could report."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        JsonLineSocket(connection, timeout_s)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle_s
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * timeout_s


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
    in_slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}  # of the batch script, or of mpirun's own daemon
    assert rank_of(in_slurm | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}) == (5, 2)
    assert rank_of(in_slurm | {"PMI_RANK": "6", "MPI_LOCALRANKID": "3"}) == (6, 3)
    assert rank_of({"SLURM_PROCID": "7", "SLURM_LOCALID": "3", "PMI_RANK": "7"}) == (7, 3)  # srun --mpi=pmi2
    assert rank_of({"PMI_RANK": "1"}) == (1, 0)
    with pytest.raises(KeyError, match="no launcher"):
        rank_of({})


def lines_of_strangers(rng, token):
    """Yield (whether the connection has said a true hello before, one line of 20 kinds that no guard sends)."""
    beat = json.dumps({"beat": BEAT})
    while True:
        number, text = rng.choice([-1, 2, 9, 10**9, 2**64, 10**400]), "".join(map(chr, rng.choices(range(0x300), k=9)))
        noise = bytes(rng.choices([one for one in range(256) if one != 10], k=rng.randrange(1, 80)))
        wrong = rng.choice([None, True, 5, 1.5, "5", [], {}, [[]], {"a": 1}, text])
        at = rng.choice(sorted(BEAT))
        odd = rng.choice(
            ['"\\ud800"', '"\\udfff"', "NaN", "-Infinity", "1e999", "-1", "9" * 5000, "[" * 500 + "]" * 500]
        )
        yield False, noise
        yield False, b'{"rank":0,"hello":"\\ud800"}'
        yield False, json.dumps({"rank": rng.choice([True, False]), "hello": token}).encode()
        yield False, json.dumps({"rank": wrong, "hello": token}).encode()
        yield False, json.dumps({"rank": 1, "hello": wrong}).encode()
        yield False, f'{{"rank": {number}, "hello": "{token}"}}'.encode()
        yield False, json.dumps({"rank": 1, "hello": token, text: wrong}).encode()
        yield False, json.dumps({"rank": 1, "hello": rng.choice([token[:-1], token + text, token.upper()])}).encode()
        yield False, b'{"rank": 1, "hello": "' + b"a" * rng.randrange(4097, 9000) + b'"}'
        yield False, beat.encode()
        yield True, noise
        yield True, json.dumps(wrong).encode()
        yield True, json.dumps({"beat": wrong or 5}).encode()
        yield True, json.dumps({"beat": BEAT | {at: {"x": wrong}}}).encode()
        yield True, json.dumps({"beat": BEAT | {at + "_": wrong}}).encode()
        yield True, beat.replace("0.1", odd).encode()
        yield True, json.dumps({"ended": rng.choice([True, 1e3, "0", 10**9, None]), "last": {}}).encode()
        yield True, json.dumps({"ended": 1, "last": {}, "failure": FAILURE | {"problems": wrong or 5}}).encode()
        yield True, json.dumps({"ended": 1, "last": {}, "failure": FAILURE | {"rank": 0}}).encode()
        yield True, json.dumps({"stacks": rng.choice([None, 1, ["py-spy"]]), "beat": BEAT}).encode()


def test_ten_thousand_lines_of_strangers_end_their_own_connections_alone(watch):
    """Each line ends the connection that it came by, rank 0 goes on, and nothing of it is believed."""
    rank = guard(watch, 0)
    until(watch, lambda: watch.states[0].here)
    rank.send({"beat": BEAT})
    assert received(watch, rank) == [{"heard": True}]
    lines = lines_of_strangers(random.Random(3), "secret")
    for _ in range(100):  # times 100 lines
        group = []
        for authentic, line in itertools.islice(lines, 100):
            ours, theirs = socket.socketpair()
            theirs.sendall(line + b"\n")
            connection = JsonLineSocket(ours, 1.0)
            watch.adopt(connection)
            if authentic:
                watch._authenticate(connection, Hello(hello="secret", rank=1))
                watch.states[1].here = False  # for the next one
            group.append((theirs, line))
        watch.poll(0.02)
        for theirs, line in group:
            theirs.settimeout(2)
            with suppress(ConnectionResetError):
                assert theirs.recv(99) == b"", line[:99]
            theirs.close()
        assert (watch.states[1].beat, watch.states[1].ended, watch.states[1].failure) == ({}, None, None)
        watch.states[1].lost = False
    rank.send({"beat": BEAT | {"step": 4}})
    assert received(watch, rank) == [{"heard": True}]
    assert watch.states[0].beat == BEAT | {"step": 4} and watch.verdict() is None


def assert_heard(watch):
    rank = guard(watch, 0)
    until(watch, lambda: watch.states[0].here)
    rank.send({"beat": BEAT})
    assert received(watch, rank) == [{"heard": True}]


def test_silent_strangers_are_few_and_do_not_keep_a_rank_out(watch):
    silent = [socket.create_connection(("127.0.0.1", watch.port)) for _ in range(300)]
    for _ in range(9):
        watch.poll(0.02)
    assert len(watch._unauthenticated) <= STRANGERS + len(watch.states)
    assert_heard(watch)
    for connection in silent:
        connection.close()


def test_strangers_that_speak_and_are_closed_at_once(watch):
    """More of them than are kept come in one poll: those that are closed have unread bytes."""
    talking = [socket.create_connection(("127.0.0.1", watch.port)) for _ in range(STRANGERS + 20)]
    until(watch, lambda: len(watch._unauthenticated) == STRANGERS + len(watch.states))
    talking += [socket.create_connection(("127.0.0.1", watch.port)) for _ in range(20)]
    for connection in talking:
        with suppress(OSError):  # closed by the watch
            connection.sendall(b"GET")
    for _ in range(9):
        watch.poll(0.02)
    assert_heard(watch)
    for connection in talking:
        connection.close()


def test_a_first_line_without_an_end(watch):
    with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
        stranger.sendall(b"a" * 5000)
        stranger.settimeout(2)
        for _ in range(10):
            watch.poll(0.02)
        with suppress(ConnectionResetError):
            assert stranger.recv(10) == b""


def test_silence_ends_after_a_while(watch, monkeypatch):
    monkeypatch.setattr("zerofit.watch.supervise.HELLO_S", 0.1)
    with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
        until(watch, lambda: len(watch._unauthenticated) == 1)
        until(watch, lambda: not watch._unauthenticated)
        stranger.settimeout(2)
        assert stranger.recv(10) == b""


def test_what_comes_right_behind_a_hello_is_heard(watch):
    """A rank that fails at once: hello, a beat and a long report in one piece."""
    report = {"ended": 1, "last": {}, "failure": FAILURE | {"problems": [{"kind": "a", "message": "m" * 90_000}]}}
    wire = guard(watch, 1)
    for message in ({"beat": {"silent_s": 0.1, "state": "running", "cpu_s": 1.0}}, report):
        wire.send(message)
    until(watch, lambda: watch.states[1].ended == 1)
    assert len(watch.states[1].failure["problems"][0]["message"]) == 90_000


@pytest.mark.parametrize(
    ("names", "master", "address"),
    [
        (["localhost"], None, "127.0.0.1"),  # over ssh
        (["localhost"], "localhost", "127.0.0.1"),  # one pod
        (["localhost", "other"], "localhost", ""),  # this node's own word for itself: others come by another address
        (["a", "b"], "192.0.2.1", ""),  # of a service before this node (TEST-NET-1, RFC 5737)
        (["a", "b"], "no such name", ""),
        (["a", "b"], "ours", "ours"),
    ],
)
def test_where_a_command_listens(names, master, address):
    ours = next((one for one in map(address_to, ("192.0.2.1",)) if one), None)
    if "ours" in (master, address):
        if ours is None:
            pytest.skip("this machine has no address but its loopback's")
        master = address = ours
    hosts = [Host(name, 1) for name in names]
    options = HostRequest(nodes=2, slots=1, no_ssh=True, node_rank=0, master_addr=master) if master else HostRequest()
    assert listening_address(hosts, options) == address
