"""The ranks of this machine: argument vector and environment for the deepspeed launcher, and its end."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.spec.cache import cache_root
from zerofit.spec.facts import Machine
from zerofit.spec.folder import RunFolder

REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 10.0  # between the request to stop and the kill


def launcher(ranks: int, port: int) -> list[str]:
    """The deepspeed launcher of one node (`deepspeed.launcher.launch`), without the multi-node runner before it.

    The runner looks for a hostfile of the machine's and exits 0 when this launcher is killed; one node needs neither.
    The launcher and its ranks end with this process.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    argv = [sys.executable, "-m", "zerofit.launch.parent", str(os.getpid()), "deepspeed.launcher.launch"]
    return [*argv, f"--world_info={world}", f"--master_port={port}", "--no_local_rank"]


def environment(machine: Machine, ranks: int) -> dict[str, str]:
    """The environment of the ranks: accelerator, threads a rank, a place of its own for compiled ops."""
    env = dict(os.environ)
    env.setdefault("DS_ACCELERATOR", machine.accelerator)
    env.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PYTHONSAFEPATH"] = "1"  # a user's profile.py must not stand in for the standard library's
    if machine.accelerator == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores // ranks)))
        env.setdefault("LOCAL_SIZE", str(ranks))
    return env


def ops_folder() -> Path:
    """Where this environment's compiled C++ ops lie; two environments that shared one would rebuild each other's."""
    versions = [importlib.metadata.version(name) for name in ("torch", "deepspeed")]
    key = hashlib.sha256("\n".join([sys.prefix, sys.version, *versions]).encode()).hexdigest()[:12]
    return cache_root() / "ops" / key


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(folder: RunFolder, ranks: int, machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher's process while the block runs; afterwards nothing of it is left, however the block ends.

    The first request to stop (SIGTERM, SIGUSR1, a closed terminal) is handed on to the ranks, which save and end; a
    second one ends the block as Ctrl-C does, with KeyboardInterrupt.
    """
    log = (folder.logs / "launcher.log").open("ab")
    process = subprocess.Popen(
        [*launcher(ranks, free_port()), "--module", "zerofit.worker", str(folder.path)],
        env=environment(machine, ranks),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    log.close()

    def hand_on(*_: object) -> None:
        folder.stop_request.touch()
        for one in REQUESTS:
            signal.signal(one, signal.default_int_handler)

    former = {number: signal.signal(number, hand_on) for number in REQUESTS}
    try:
        yield process
    finally:
        _stop(process)
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher's whole session: first asked, then killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
