"""The processes that measure one row. They start and stop together; each writes a report."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from zerofit.app.comparing.on_host import order
from zerofit.compare.job import STRATEGIES, CompareJob, RankReport
from zerofit.doctor.remote import command
from zerofit.launch.host import environment
from zerofit.launch.local import free_port
from zerofit.spec.local_machine import usable_cores
from zerofit.spec.server_process import ServerProcess

# A row's processes are forked from one server (`rank_server`), which has imported torch once. On other hosts each
# process is started over ssh (`on_host`).
SERVER = "zerofit.app.comparing.rank_server"
ON_HOST = "zerofit.app.comparing.on_host"
POLL_S = 0.1
GRACE_S = 10.0  # time for the other processes after one has failed
SILENT_S = 300.0  # limit without a step
LAST = 3  # log lines shown for a process without a report


class Rank:
    """A running rank; `poll`, `kill`, `wait` and `returncode` behave as in subprocess.Popen."""

    def __init__(self, server: ServerProcess, pid: int):
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the rank runs."""
        return self._ask("poll")

    def kill(self) -> None:
        """Kill the rank if it is still running."""
        self._ask("end")

    def wait(self) -> int | None:
        """Return the exit code of a killed rank."""
        return self.returncode

    def _ask(self, what: str) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.ask({what: self.pid})
            except RuntimeError:  # the server has died, and its ranks with it
                self.returncode = -signal.SIGKILL
        return self.returncode


_SERVERS: ContextVar[list[ServerProcess] | None] = ContextVar("servers", default=None)  # only the last may be alive


@contextmanager
def one_server() -> Iterator[None]:
    """Fork all ranks that start in this block from one process. Nested blocks share it."""
    # A process that has imported torch once forks each rank in milliseconds instead of seconds.
    if _SERVERS.get() is not None:
        yield
        return
    servers: list[ServerProcess] = []
    token = _SERVERS.set(servers)
    try:
        yield
    finally:
        _SERVERS.reset(token)
        for server in servers:  # ends its ranks, too
            server.end()


def start_rank(folder: Path, env: Mapping[str, str], log: Path) -> Rank:
    """Start a rank of the job in `folder`. Call this inside a `one_server` block.

    `env`: its environment. `log`: the file for its output.
    """
    servers = _SERVERS.get()
    assert servers is not None
    if not servers or servers[-1].process.poll() is not None:
        servers.append(ServerProcess(SERVER, answers=True))
    return Rank(servers[-1], servers[-1].ask({"start": [str(folder), dict(env), str(log)]}))


Process = subprocess.Popen[bytes] | Rank


def run_job(job: CompareJob, folder: Path, show: Callable[[str], None]) -> list[RankReport]:
    """Run the processes of a job; return their measurements, or why a process has none.

    `folder`: for their logs and reports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Reports of an earlier attempt must not be taken for those of this one.
    for file in (*folder.glob("rank-*.json"), folder / "done"):
        file.unlink(missing_ok=True)
    job.write(folder / "job.json")
    with _started(job, folder) as running:
        late = _wait(running, folder, show)
        codes = [process.poll() for process in running]
    return [_report(folder, rank, code, late) for rank, code in enumerate(codes)]


@contextmanager
def _started(job: CompareJob, folder: Path) -> Iterator[list[Process]]:
    """Start the processes. At the end of the block, kill those that still run."""
    processes = STRATEGIES[job.strategy].processes(job.ranks)
    first = job.hosts[0][0] if job.hosts else "127.0.0.1"
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": first, "MASTER_PORT": str(free_port())}
    running: list[Process] = []
    try:
        for rank in range(processes):
            running.append(_start(job, folder, rank, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start(job: CompareJob, folder: Path, rank: int, own: dict[str, str]) -> Process:
    """Start one process here, or over ssh on its rank's host."""
    log = folder / f"rank-{rank}.log"
    if not job.hosts:
        log.write_bytes(b"")
        return start_rank(folder, environment(job.accelerator, usable_cores(), job.ranks) | own, log)
    # Ranks fill the slots of the hosts in order. A parameter server, which has the last number, runs on the last
    # rank's host.
    places = [(name, number, slots) for name, slots in job.hosts for number in range(slots)][: job.ranks]
    name, number, slots = places[min(rank, len(places) - 1)]
    with log.open("wb") as file:
        process = subprocess.Popen(command(name, ON_HOST, None), stdin=subprocess.PIPE, stdout=file, stderr=file)
    assert process.stdin
    with suppress(BrokenPipeError):  # ssh has failed; its log has the reason
        process.stdin.write(order(folder, job.accelerator, slots, own | {"LOCAL_RANK": str(number)}))
        process.stdin.flush()
    return process


def _wait(running: list[Process], folder: Path, show: Callable[[str], None]) -> bool:
    """Wait until all processes have ended, or for the grace period after a failure.

    Return True if progress stopped.
    """
    began = changed = time.monotonic()
    shown, deadline = "", float("inf")
    while any(process.poll() is None for process in running):
        now = time.monotonic()
        if any(process.poll() for process in running):
            deadline = min(deadline, now + GRACE_S)
        progress = (folder / "done").read_text() if (folder / "done").exists() else ""
        if progress != shown:
            shown, changed = progress, now
        if now > deadline:
            return False
        # A deadlock of a strategy is a result, too: its row fails, and the comparison continues.
        if now - changed > SILENT_S:
            return True
        show(progress or f"starting ({now - began:.0f} s)")
        time.sleep(POLL_S)
    return False


def _report(folder: Path, rank: int, code: int | None, late: bool) -> RankReport:
    """Return the report of a process, or how it ended (`code` None: this command killed it)."""
    file = folder / f"rank-{rank}.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    if late:
        return {"error": f"process {rank} made no step for {SILENT_S:.0f} s"}
    if code is None:
        return {"left": f"process {rank} waited for another process that had ended"}
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {"ended": f"process {rank} exited with code {code}: {' / '.join(lines[-LAST:])}"}
