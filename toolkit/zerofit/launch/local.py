"""The site of one start's ranks, and the launcher's process on this machine, from its arguments to its end."""

from __future__ import annotations

import base64
import json
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
from pathlib import Path
from types import FrameType

from zerofit.launch.host import environment
from zerofit.launch.parent_death import LAUNCHER
from zerofit.launch.world import NEVER_GIVEN
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.model_facts import Machine
from zerofit.spec.process import stop_requests
from zerofit.spec.run_folder import Job, RunFolder

HERE = "localhost"
SAME_S = 2.0  # schedulers send two signals for one request (Slurm: SIGUSR1 and SIGTERM)
GRACE_S = 10.0  # for a launcher whose ranks have ended
GUARD = Path(__file__).parents[1] / "watch" / "rank_guard.py"


@dataclass(frozen=True, kw_only=True)
class LaunchSite:
    """Hosts and devices for the ranks; made by `launch.local` for this machine and by `launch.runner` for many."""

    hosts: tuple[str, ...]  # one a rank
    addresses: Mapping[str, str]  # for each host: this command's address as seen from there
    master: tuple[str, int]  # where rank 0 will listen
    accelerator: str  # "cuda" or "cpu"
    argv: Callable[[str], list[str]]  # the launcher's command, from the launch spec as one argument
    env: Callable[[str], Mapping[str, str]]  # the launcher's environment, from the start's run id
    cwd: str | None = None  # the launcher's; None: this command's
    forwarded: Mapping[str, str] = field(default_factory=dict)  # environment of the ranks beside what their host sets
    interfaces: Mapping[str, str] = field(default_factory=dict)  # for each host: the network interface to the others
    again: str = "zerofit train"  # the command that goes on with the run folder, given after it
    coming_s: float = 180.0  # until a guard must have reported: ssh, Python and file systems on their first day
    timeout_s: float  # without a heartbeat for so long, the ranks are ended
    sweep: Callable[[str], list[str]] | None = None  # ends what has a run id on all hosts; returns notes for the user


def launcher(ranks: int, port: int) -> list[str]:
    """Return the deepspeed launcher of one node (`deepspeed.launcher.launch`), without the multi-node runner before it.

    The runner looks for a hostfile of the machine's and exits 0 when this launcher is killed; one node needs neither.
    The launcher and its ranks end with this process.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    argv = [sys.executable, "-m", "zerofit.launch.parent_death", str(os.getpid()), LAUNCHER]
    return [*argv, f"--world_info={world}", f"--master_port={port}", "--no_local_rank"]


def local_site(job: Job, machine: Machine) -> LaunchSite:
    """Return the devices of this machine as a site."""
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
    """Return a TCP port that nothing has at this moment, of those that no system gives away unasked.

    Rank 0 listens seconds later, when it has imported torch: a port that the system chose may be another's by then.
    """
    for port in random.SystemRandom().sample(NEVER_GIVEN, len(NEVER_GIVEN)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    message, hint = f"no free port in {NEVER_GIVEN.start} to {NEVER_GIVEN.stop - 1}", "end what listens on them"
    raise UserError(Problem(kind="ranks", message=message, hint=hint))


@contextmanager
def started(
    folder: RunFolder, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, *, handle_signals: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the launcher's process while the block lasts; nothing of it is left on this host, however the block ends."""
    with _requests_handed_on(folder) if handle_signals else nullcontext():
        with (folder.logs / "launcher.log").open("ab") as log:
            process = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            _stop(process)


@contextmanager
def _requests_handed_on(folder: RunFolder) -> Iterator[None]:
    """Hand the first request to stop (SIGTERM, SIGUSR1, a closed terminal) on to the ranks, which save and end.

    One that comes later ends the block as Ctrl-C does, with KeyboardInterrupt.
    """
    asked: list[float] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > SAME_S:
            signal.default_int_handler(number, frame)
        folder.stop_request.touch()

    former = {number: signal.signal(number, hand_on) for number in stop_requests()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Wait for the launcher, whose ranks have been told to end, and kill what is left of its session.

    It is not asked to end: DeepSpeed's runner would answer with a `pkill` on all hosts, which hits other runs too.
    """
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
