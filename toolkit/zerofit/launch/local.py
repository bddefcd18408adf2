"""Where and how ranks are launched, and the launcher's process on this machine."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from zerofit.launch.host import environment
from zerofit.launch.world import NEVER_GIVEN
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.model_facts import Machine
from zerofit.spec.process import stop_requests
from zerofit.spec.run_folder import Job, RunFolder

HERE = "localhost"
SAME_S = 2.0  # schedulers send two signals for one request (Slurm: SIGUSR1 and SIGTERM)
STARTED = "zerofit starts this launcher:"  # begins the part of each start in launcher.log
GRACE_S = 10.0  # time for a launcher to exit after its ranks
COMING_S = 180.0  # time limit for guards to report; ssh, Python and cold file systems can be slow
GUARD = Path(__file__).parents[1] / "watch" / "rank_guard.py"


@dataclass(frozen=True, kw_only=True)
class LaunchSite:
    """The hosts and devices for the ranks of a launch, and the command that starts them."""

    hosts: tuple[str, ...]  # one per rank
    addresses: Mapping[str, str]  # by host: this command's address as seen from that host
    master: tuple[str, int]  # address and port of rank 0
    accelerator: str  # "cuda" or "cpu"
    argv: Callable[[str], list[str]]  # returns the launcher's command, given the encoded path of the launch spec
    env: Callable[[str], Mapping[str, str]]  # returns the launcher's environment for a run id
    cwd: str | None = None  # working directory of the launcher; None: this command's
    forwarded: Mapping[str, str] = field(default_factory=dict)  # environment of the ranks on top of their host's
    interfaces: Mapping[str, str] = field(default_factory=dict)  # by host: the network interface to the others
    again: str = "zerofit train"  # command that resumes a run folder; the folder is its argument
    coming_s: float = COMING_S
    timeout_s: float  # time without a heartbeat after which ranks are killed
    sweep: Callable[[str], list[str]] | None = None  # kills the processes of a run id on all hosts; returns notes


def launcher(ranks: int, port: int) -> list[str]:
    """Return the beginning of a command that runs a program once per rank on this machine.

    The program and its arguments come next. The ranks end when this process ends (`launch.local_ranks`).
    """
    return [sys.executable, "-m", "zerofit.launch.local_ranks", str(os.getpid()), str(ranks), str(port)]


def local_site(job: Job, machine: Machine) -> LaunchSite:
    """Return the launch site for the ranks of a job on this machine."""
    ranks = job.layout.world_size
    port, env = free_port(), environment(machine.accelerator, machine.cores, ranks)
    return LaunchSite(
        hosts=(HERE,) * ranks,
        addresses={HERE: "127.0.0.1"},
        master=("127.0.0.1", port),
        accelerator=machine.accelerator,
        argv=lambda spec: [*launcher(ranks, port), str(GUARD), spec],
        env=lambda mark: env,
        timeout_s=job.run.heartbeat_timeout,
    )


def free_port() -> int:
    """Return a free TCP port in a range from which no system assigns ports."""
    # Rank 0 listens seconds later, after importing torch. Until then, the system could assign a port outside this range
    # to another process.
    # A user's random.seed() does not affect SystemRandom. Several runs with one seed would try the same ports.
    for port in random.SystemRandom().sample(NEVER_GIVEN, len(NEVER_GIVEN)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    message, hint = f"no free port in {NEVER_GIVEN.start} to {NEVER_GIVEN.stop - 1}", "stop processes that use them"
    raise UserError(Problem(kind="ranks", message=message, hint=hint))


@contextmanager
def started(
    folder: RunFolder, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, *, handle_signals: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the launcher's process during the block. At the end, kill its processes on this host."""
    with _requests_passed_on(folder) if handle_signals else nullcontext():
        with (folder.logs / "launcher.log").open("ab", buffering=0) as log:
            log.write(f"{STARTED} {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
            # A session of its own: Ctrl-C in the terminal reaches only this command, which ends the ranks in order.
            process = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            _stop(process)


@contextmanager
def _requests_passed_on(folder: RunFolder) -> Iterator[None]:
    """Pass the first stop request to the ranks, which save and stop.

    A stop request is SIGTERM, SIGUSR1 or a closed terminal. A later request ends the block with KeyboardInterrupt, like
    Ctrl-C.
    """
    times: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        # The handler runs in the main thread, within any Python code. So it only creates a file, which the ranks look
        # for.
        if times[-1] - times[0] > SAME_S:
            signal.default_int_handler(number, frame)
        folder.stop_request.touch()

    former = {number: signal.signal(number, pass_on) for number in stop_requests()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Wait for the launcher, whose ranks were asked to stop, and kill the rest of its session."""
    # no SIGTERM: DeepSpeed's runner would run `pkill` on all hosts, which also kills other runs
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
