"""Simulations side by side, each in a process of its own that is forked from one that has imported everything.

That one is started by its own command line and not by multiprocessing, which would run the user's script once more in
each process: simulations work from a script without `if __name__ == "__main__"`, from a notebook and from any thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from zerofit.simulate.record import RankRecord
from zerofit.simulate.server import GROUP, REQUEST
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.errors import Problem

POLL_S = 0.2
KILLED = Problem(
    kind="killed",
    message="a simulation's process was killed from outside, most often by the kernel for want of memory",
    hint="simulate fewer layers (--model-args), or one rank (--rank)",
)


def simulate_all(targets: Sequence[SimulationTarget], show: Callable[[str], None]) -> list[RankRecord | Problem]:
    """Return the record of each target's rank, or the reason why there is none.

    As many run at a time as there are cores; `show` hears how far they are.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, start = Path(name), time.monotonic()
        path = [os.path.abspath(entry) for entry in sys.path]
        (folder / REQUEST).write_bytes(pickle.dumps((path, os.getcwd(), list(targets))))
        server = _server()
        server.ask(folder)
        try:
            while not all((folder / f"{n}.ended").exists() for n in range(len(targets))):
                server.refuse_if_ended()
                show(_progress(folder, len(targets), time.monotonic() - start))
                time.sleep(POLL_S)
        except BaseException:
            with suppress(OSError, ValueError):  # not begun, or over
                os.killpg(int((folder / GROUP).read_text()), signal.SIGKILL)
            raise
        return [_result(folder / f"{n}.result") for n in range(len(targets))]


class _Server:
    """A running `zerofit.simulate.server`, which ends with this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open while the server runs
        # what the server imports is found as it is here; a session of its own: Ctrl-C is this process's to answer
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zerofit.simulate.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def ask(self, folder: Path) -> None:
        """Hand over a request."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `refuse_if_ended` says why
            self.process.stdin.write(f"{folder}\n".encode())
            self.process.stdin.flush()

    def refuse_if_ended(self) -> None:
        """Raise a RuntimeError where the server has ended by itself."""
        if self.process.poll() is not None:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"the process that simulations start from has ended ({self.process.returncode}): {last}")


_lock = threading.Lock()
_running: _Server | None = None


def _server() -> _Server:
    """Return the server of this process, started when it is first needed."""
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid() or _running.process.poll() is not None:
            _running = _Server()
        return _running


def _result(file: Path) -> RankRecord | Problem:
    if not file.exists():
        return KILLED
    result = pickle.loads(file.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def _progress(folder: Path, count: int, seconds: float) -> str:
    ended = [n for n in range(count) if (folder / f"{n}.ended").exists()]
    statuses = [folder / f"{n}.status" for n in range(count) if n not in ended]
    now = list(filter(None, (status.read_text() for status in statuses if status.exists())))
    what = f": {', '.join(now)}" if now else ": importing torch and DeepSpeed" if not ended else ""
    done = f" {len(ended)} of {count} done" if count > 1 else ""
    return f"simulating{what}{done} ({seconds:.0f} s)"
