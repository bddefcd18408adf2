"""The guard process of a rank. It starts the rank and reports its heartbeats to the command.

It kills the rank on request, or if the connection to the command breaks. It imports neither torch nor pydantic.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # keep this script's folder out of the module search

import faulthandler
import json
import selectors
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from zerofit.launch.host import RUN_ID, environment, interface_to
from zerofit.launch.parent_death import end_with_parent
from zerofit.spec.local_machine import gpu_memory, usable_cores
from zerofit.spec.memory_limit import leave_group, out_of_memory
from zerofit.spec.reservations import is_reserved, needed_by, read_forecast, reserve
from zerofit.watch.json_lines import ConnectionLost, JsonLineSocket
from zerofit.watch.launch_spec import HEARTBEAT_FD, HOST_NAME, JOINED, LaunchSpec, from_argument, rank_group, rank_of

BEAT_S = 1.0
CONNECT_S = 30.0
FROZEN_S = 5.0
LAST_REPORT_S = 3.0  # for the command to read the last reports
FAILED = 3
DUMP = signal.SIGUSR2  # handled by the rank's faulthandler
DUMP_S = 4.0
SETTLE_S = 0.5
RANK_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)  # handled by the rank, not its guard


# Each rank has a guard, a small process between the launcher and the rank:
#
#   command ◄── TCP: heartbeats, failures, the end ── guard ◄── pipe: heartbeats, failures ── rank
#           ── TCP: "stacks", "kill" ──►                    ── SIGKILL, a signal for stacks ──►
#
# The rank's own thread cannot report while C++ code holds the interpreter lock, and a killed rank reports nothing, so
# another process has to. The guard kills the rank if its connection to the command breaks: no rank outlives its
# command. It starts fast (no torch) and needs little memory, since each rank has a guard.
class RankGuard:
    """The guard of one rank."""

    def __init__(
        self, spec: LaunchSpec, rank: int, process: subprocess.Popen[bytes], heartbeat: int, *, joined: bool = False
    ):
        """Guard a rank's process. `joined`: wait for the command's end, and exit with its code."""
        self._spec, self._rank, self._process, self._joined = spec, rank, process, joined
        self._stacks = Path(spec.folder, "logs", f"rank-{rank}.stacks.txt")
        self._host = spec.hosts[rank]
        self._heartbeat, self._unfinished_line = heartbeat, b""
        os.set_blocking(heartbeat, False)
        self._answered = True  # the command has confirmed the last heartbeat
        self._last_beat: dict[str, object] = {}
        self._failure: dict[str, object] | None = None  # failure that the rank reported
        self._heard = time.monotonic()
        self._socket: JsonLineSocket | None = None

    def run(self) -> int:
        """Watch until the rank has ended; return the guard's exit code."""
        code = FAILED
        try:
            self._socket = self._connect()
            code = self._watch(self._socket)
        except ConnectionLost as lost:
            print(
                f"guard of rank {self._rank}: lost the connection to the command that supervises it ({lost})",
                file=sys.stderr,
            )
            dump_stacks(self._process.pid, self._stacks)
        finally:
            self._end_rank()
        if self._socket:
            code = self._exit_code_from(self._socket, code) if self._joined else code
            self._socket.finish(LAST_REPORT_S)
        return code

    def _end_rank(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        leave_group(rank_group(self._spec.run_id, self._rank))

    def _exit_code_from(self, connection: JsonLineSocket, code: int) -> int:
        """Return the exit code that the command sends at its end; `code` if it sends none."""
        # if this process failed first, the launcher would kill the command before it has shown its verdict
        with selectors.DefaultSelector() as selector, suppress(ConnectionLost):
            connection.send({"ended": self._process.poll() or 0, "last": self._last_beat, "failure": self._failure})
            selector.register(connection, selectors.EVENT_READ)
            while True:
                selector.select()
                for order in connection.receive():
                    code = order.get("code", code)
        return code

    def _connect(self) -> JsonLineSocket:
        deadline, address = time.monotonic() + CONNECT_S, self._spec.watch[self._host]
        while True:
            try:
                connected = socket.create_connection(address, timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"{address[0]} port {address[1]}: {error}") from error
                time.sleep(0.5)
        connection = JsonLineSocket(connected, self._spec.timeout_s)
        connection.send({"hello": self._spec.token, "rank": self._rank})
        return connection

    def _watch(self, connection: JsonLineSocket) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._heartbeat, selectors.EVENT_READ)
            next_beat, looked = 0.0, time.monotonic()
            while True:
                if time.monotonic() - looked > FROZEN_S:  # all processes on this host were stopped
                    self._heard += time.monotonic() - looked
                looked = time.monotonic()
                # The rank's end is polled: forked data loaders keep the pipe open after it.
                for key, _ in selector.select(0.1):
                    if key.fileobj is connection:
                        for order in connection.receive():
                            if self._handle(order, connection):
                                return FAILED
                    elif not self._hear():
                        selector.unregister(self._heartbeat)
                code = self._process.poll()
                if code is not None:
                    return self._report_end(code, connection)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    connection.flush()
                    if self._answered:  # otherwise the command is stopped, and unread lines would pile up
                        self._answered = False
                        connection.send({"beat": self._beat()})

    def _hear(self) -> bool:
        """Read the rank's heartbeats and reports. Return False once the rank has closed the pipe."""
        try:
            data = os.read(self._heartbeat, 65536)
        except BlockingIOError:
            return True
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        for line in map(json.loads, lines):
            self._heard = time.monotonic()
            if "failure" in line:
                self._failure = line["failure"]
            else:
                self._last_beat = line
        return bool(data)

    def _beat(self) -> dict[str, object]:
        state, cpu_s = "gone", 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            state, times = process.status(), process.cpu_times()
            cpu_s = times.user + times.system
        silent_s = round(max(0.0, time.monotonic() - self._heard), 1)
        return {**self._last_beat, "silent_s": silent_s, "state": state, "cpu_s": cpu_s}

    def _handle(self, order: dict[str, object], connection: JsonLineSocket) -> bool:
        self._answered |= "heard" in order
        if order.get("do") == "stacks":
            connection.send({"stacks": dump_stacks(self._process.pid, self._stacks)})
        return order.get("do") == "kill"

    def _report_end(self, code: int, connection: JsonLineSocket) -> int:
        """Report how the rank ended, and return the guard's exit code."""
        self._hear()
        if leave_group(rank_group(self._spec.run_id, self._rank)) and self._failure is None:
            log = Path(self._spec.folder, "logs", f"rank-{self._rank}.log")
            problem = out_of_memory("the kernel killed this rank at its memory limit", log)
            host = {"host": self._host} if len(set(self._spec.hosts)) > 1 else {}
            self._failure = {"rank": self._rank, **host, "time_s": time.time(), "problems": [problem.as_dict()]}
        if self._joined:
            return FAILED if code else 0
        connection.send({"ended": code, "last": self._last_beat, "failure": self._failure})
        if code == 0:
            return 0
        # Exit only when the command requests it. The launcher kills the other ranks then, and they must report first.
        deadline = time.monotonic() + self._spec.timeout_s
        with selectors.DefaultSelector() as selector, suppress(ConnectionLost):
            selector.register(connection, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(0.5) and any(self._handle(order, connection) for order in connection.receive()):
                    break
        # As a shell reports a process that a signal has ended: 137 for SIGKILL.
        return code if code > 0 else 128 - code


def main() -> None:
    """Start and guard a rank: `rank_guard.py [--joined] SPEC`.

    SPEC: the path of the launch spec, encoded by `as_argument`. --joined: the user's launcher started this process,
    which then waited for the spec (`app.training.from_launcher`).
    """
    joined = JOINED in sys.argv
    if not joined:  # a joined guard already ends with its parent, which may be process 1 of a container
        end_with_parent()
    for number in RANK_SIGNALS:
        # The rank inherits this until it installs its own handlers, so a request during its start does not kill it.
        signal.signal(number, signal.SIG_IGN)
    path = from_argument(sys.argv[-1])
    spec = LaunchSpec.read(path)
    rank, local_rank = rank_of(os.environ)
    forecast = read_forecast(Path(spec.folder))
    if local_rank == 0 and forecast and not is_reserved(Path(spec.folder)):
        # the host's first rank reserves the memory of all its ranks, unless the command has done it
        ranks = spec.hosts.count(spec.hosts[rank])
        needs = needed_by(range(rank, rank + ranks), spec.world_size, forecast)
        gpus = gpu_memory(ranks) if spec.accelerator == "cuda" else []
        gpu_bytes = forecast["reserved_bytes"] + forecast["beside_bytes"]
        reserve(Path(spec.folder), sum(needs), {gpu.uuid: gpu_bytes for gpu in gpus})
    # the rank inherits only the writing end, so the guard sees the end of the pipe when the rank ends
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "zerofit.worker", spec.folder],
        env=_environment(spec, rank, local_rank) | {HEARTBEAT_FD: str(writing)},
        cwd=spec.cwd if os.path.isdir(spec.cwd) else "/",
        stdin=subprocess.DEVNULL,
        pass_fds=[writing],
    )
    os.close(writing)
    sys.exit(RankGuard(spec, rank, process, reading, joined=joined).run())


def listen_for_dumps(path: Path) -> None:
    """Make a signal write the stacks of all threads to a file, even while this rank runs C++."""
    faulthandler.register(DUMP, file=path.open("a"), all_threads=True, chain=False)


def dump_stacks(pid: int, path: Path) -> str:
    """Append the stacks of a process to a file. Return the method used, or what failed."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool:
        try:
            # --nonblocking: py-spy cannot pause a stopped process
            done = subprocess.run(
                [tool, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=DUMP_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done and done.returncode == 0:
            try:
                with path.open("ab") as file:
                    file.write(done.stdout)
            except OSError as error:
                return str(error)
            return "py-spy"
    before = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, DUMP)
        os.kill(pid, signal.SIGCONT)  # a stopped process handles signals only after SIGCONT
    except ProcessLookupError:
        return "it has exited"
    deadline = time.monotonic() + DUMP_S
    while time.monotonic() < deadline:
        # The file grows for a moment: faulthandler writes the stack of one thread after the other.
        time.sleep(SETTLE_S)
        if path.exists() and path.stat().st_size > before:
            return "faulthandler"
    return "it does not answer"


def _environment(spec: LaunchSpec, rank: int, local_rank: int) -> dict[str, str]:
    local_size = spec.hosts.count(spec.hosts[rank])
    forwarded = spec.environment | {RUN_ID: spec.run_id}
    env = environment(spec.accelerator, usable_cores(), local_size, {**os.environ, **forwarded})
    interface = spec.interfaces.get(spec.hosts[rank])
    if interface is None and len(set(spec.hosts)) > 1:
        interface = interface_to(spec.master[0])
    if interface:
        # NCCL and gloo would choose interfaces by themselves, which may lead to no other host.
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    variables: dict[str, object] = {HOST_NAME: spec.hosts[rank]} if len(set(spec.hosts)) > 1 else {}
    variables |= {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": spec.world_size, "LOCAL_SIZE": local_size}
    variables |= {"MASTER_ADDR": spec.master[0], "MASTER_PORT": spec.master[1]}
    return env | {name: str(value) for name, value in variables.items()}


if __name__ == "__main__":
    main()
