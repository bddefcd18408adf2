"""Beside each rank: starts it, tells the command that watches how it fares, and ends it when that is ordered or the
command is gone. Stays light: no torch, no pydantic."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # started as a script, whose folder must not be searched for modules

import json
import selectors
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from zerofit.launch.environment import environment
from zerofit.launch.orphans import MARK_NAME
from zerofit.launch.parent_death import end_with_parent
from zerofit.launch.route import interface_to
from zerofit.spec.local_machine import usable_cores
from zerofit.watch.json_lines import ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import HEARTBEAT_FD, HOST_NAME, LaunchSpec, from_argument, rank_of
from zerofit.watch.stacks import dump

BEAT_S = 1.0
CONNECT_S = 30.0
FROZEN_S = 5.0
LAST_WORDS_S = 3.0  # for the command to read them
FAILED = 3
LEFT_ALONE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)  # the rank answers them, not its guard


class RankGuard:
    """One rank's guard."""

    def __init__(self, orders: LaunchSpec, rank: int, process: subprocess.Popen[bytes], pulse: int, stacks: Path):
        self._orders, self._rank, self._process, self._stacks = orders, rank, process, stacks
        self._host = orders.hosts[rank]
        self._pulse, self._half = pulse, b""
        os.set_blocking(pulse, False)
        self._answered = True  # whether the command has heard the last beat
        self._last: dict[str, Any] = {}
        self._failure: dict[str, Any] | None = None  # what the rank has reported
        self._heard = time.monotonic()
        self._wire: JsonLineSocket | None = None

    def run(self) -> int:
        """Watch until the rank has ended; the exit code to end with."""
        try:
            self._wire = self._connect()
            return self._watch()
        except ConnectionLost as lost:
            print(f"guard of rank {self._rank}: the command that watches is out of reach ({lost})", file=sys.stderr)
            dump(self._process.pid, self._stacks)
            return FAILED
        finally:
            self._kill()

    def _connect(self) -> JsonLineSocket:
        deadline, address = time.monotonic() + CONNECT_S, self._orders.watch[self._host]
        while True:
            try:
                connection = socket.create_connection(address, timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"{address[0]} port {address[1]}: {error}") from error
                time.sleep(0.5)
        wire = JsonLineSocket(connection, self._orders.timeout_s)
        pids = {"pid": self._process.pid, "guard_pid": os.getpid()}
        wire.send({"hello": self._orders.token, "rank": self._rank, "host": self._host, **pids})
        return wire

    def _watch(self) -> int:
        wire = self._wire
        assert wire
        with selectors.DefaultSelector() as selector:
            selector.register(wire, selectors.EVENT_READ)
            selector.register(self._pulse, selectors.EVENT_READ)
            next_beat, looked = 0.0, time.monotonic()
            while True:
                if time.monotonic() - looked > FROZEN_S:  # all processes here were stopped
                    self._heard += time.monotonic() - looked
                looked = time.monotonic()
                for key, _ in selector.select(0.1):
                    if key.fileobj is wire:
                        for order in wire.receive():
                            if self._obey(order, wire):
                                return FAILED
                    elif not self._hear():
                        selector.unregister(self._pulse)
                code = self._process.poll()
                if code is not None:
                    return self._report_end(code, wire)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    wire.flush()
                    if self._answered:  # else the command is stopped, and unread lines would pile up
                        self._answered = False
                        wire.send({"beat": self._beat()})

    def _hear(self) -> bool:
        """Take what the rank has said; False once it has closed its end."""
        try:
            data = os.read(self._pulse, 65536)
        except BlockingIOError:
            return True
        *lines, self._half = (self._half + data).split(b"\n")
        for line in map(json.loads, lines):
            self._heard = time.monotonic()
            if "failure" in line:
                self._failure = line["failure"]
            else:
                self._last = line
        return bool(data)

    def _beat(self) -> dict[str, Any]:
        state, cpu_s = "gone", 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            state, times = process.status(), process.cpu_times()
            cpu_s = times.user + times.system
        return {**self._last, "silent_s": round(time.monotonic() - self._heard, 1), "state": state, "cpu_s": cpu_s}

    def _obey(self, order: dict[str, Any], wire: JsonLineSocket) -> bool:
        """Do what is ordered; whether that is to make an end."""
        self._answered |= "heard" in order
        if order.get("do") == "stacks":
            wire.send({"stacks": dump(self._process.pid, self._stacks)})
        return order.get("do") == "kill"

    def _report_end(self, code: int, wire: JsonLineSocket) -> int:
        """Say how the rank ended. After a failure stay until told to go: the launcher would end the other ranks, and
        what they have to say would be lost."""
        self._hear()
        wire.send({"ended": code, "last": self._last, "failure": self._failure})
        if code == 0:
            return 0
        deadline = time.monotonic() + self._orders.timeout_s
        with selectors.DefaultSelector() as selector, suppress(ConnectionLost):
            selector.register(wire, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(0.5) and any(self._obey(order, wire) for order in wire.receive()):
                    break
        return code if code > 0 else 128 - code

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        if self._wire:
            self._wire.finish(LAST_WORDS_S)


def main() -> None:
    """`guard.py ORDERS`: the orders' path as `as_argument` writes it."""
    end_with_parent()
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    path = from_argument(sys.argv[-1])
    orders = LaunchSpec.read(path)
    rank, local_rank = rank_of(os.environ)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "zerofit.worker", orders.folder],
        env=_environment(orders, rank, local_rank) | {HEARTBEAT_FD: str(writing)},
        cwd=orders.cwd if os.path.isdir(orders.cwd) else "/",
        stdin=subprocess.DEVNULL,
        pass_fds=[writing],
    )
    os.close(writing)
    stacks = Path(orders.folder, "logs", f"rank-{rank}.stacks.txt")
    sys.exit(RankGuard(orders, rank, process, reading, stacks).run())


def _environment(orders: LaunchSpec, rank: int, local_rank: int) -> dict[str, str]:
    """What the rank gets: what is set on its host, what the command forwards, and its place among the ranks."""
    local_size = orders.local_size(rank)
    interface = orders.interfaces.get(orders.hosts[rank])
    if interface is None and len(set(orders.hosts)) > 1:
        interface = interface_to(orders.master[0])
    forwarded = orders.environment | {MARK_NAME: orders.mark}
    env = environment(orders.accelerator, usable_cores(), local_size, {**os.environ, **forwarded})
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interface else ():
        env.setdefault(name, interface or "")
    several = {HOST_NAME: orders.hosts[rank]} if len(set(orders.hosts)) > 1 else {}
    place: dict[str, object] = {
        **several,
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": orders.world_size,
        "LOCAL_SIZE": local_size,
    }
    place |= {"MASTER_ADDR": orders.master[0], "MASTER_PORT": orders.master[1]}
    return env | {name: str(value) for name, value in place.items()}


if __name__ == "__main__":
    main()
