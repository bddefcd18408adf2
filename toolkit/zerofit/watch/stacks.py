"""Stack traces of a process that no longer answers: py-spy where it is installed, else Python's own faulthandler."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DUMP = signal.SIGUSR2  # the rank's faulthandler answers to it
PATIENCE_S = 4.0
SETTLE_S = 0.5


def listen_for_dumps(path: Path) -> None:
    """In a rank: have a signal write the stacks of all threads to a file, also while the main thread is inside C++."""
    faulthandler.register(DUMP, file=path.open("a"), all_threads=True, chain=False)


def dump(pid: int, path: Path) -> str:
    """Append the stacks of a process to a file; how it was done, or why it was not."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool:
        try:
            # --nonblocking: a stopped process would never be paused by py-spy itself
            done = subprocess.run(
                [tool, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=PATIENCE_S, check=False
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
        os.kill(pid, signal.SIGCONT)  # a stopped process takes no signal before
    except ProcessLookupError:
        return "it is gone"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        if path.exists() and path.stat().st_size > before:
            return "faulthandler"
    return "it does not answer"
