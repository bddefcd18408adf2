"""Who is at work in a run folder: one command at a time, and no ranks of an earlier one."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run_folder import RunFolder

PATIENCE_S = 60.0  # ranks whose command was killed are killed by the kernel; a device may hold one up for a while
PROBE_S = 3.0  # others look for an instant whether a folder is held
POLL_S = 0.1


def refuse_if_held(folder: RunFolder) -> None:
    """Raise UserError if another command is at work in this run folder."""
    if folder.lock.exists():
        with _locked(folder.lock, fcntl.LOCK_SH, 0.0, folder, lambda _: None):
            pass


def is_held(folder: RunFolder) -> bool:
    """Return whether a command is at work in this run folder."""
    try:
        refuse_if_held(folder)
    except UserError:
        return True
    return False


@contextmanager
def held(folder: RunFolder, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the run folder while the block lasts. Raises UserError if another command holds it."""
    with _locked(folder.lock, fcntl.LOCK_EX, PROBE_S, folder, progress):
        wait_for_ranks(folder, progress)
        yield


def wait_for_ranks(folder: RunFolder, progress: Callable[[str], None]) -> None:
    """Wait until no rank of an earlier start is left. Raises UserError where one stays."""
    with _locked(folder.ranks_lock, fcntl.LOCK_EX, PATIENCE_S, folder, progress):
        pass


@contextmanager
def alive(folder: RunFolder) -> Iterator[None]:
    """Count this rank as alive within the block."""
    with _locked(folder.ranks_lock, fcntl.LOCK_SH, PATIENCE_S, folder, lambda _: None):
        yield


@contextmanager
def _locked(
    path: Path, kind: int, patience_s: float, folder: RunFolder, progress: Callable[[str], None]
) -> Iterator[None]:
    deadline = time.monotonic() + patience_s
    with path.open("a+") as file:  # NFS gives a shared lock to those only who may read
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another zerofit is at work in {folder.path}"
                    hint = "wait for it or stop it (SIGTERM lets it save), or name another --output"
                    raise UserError(Problem(kind="run-busy", message=message, hint=hint, where="--output")) from None
                if path == folder.ranks_lock:
                    progress("waiting for the ranks of the start before to end")
                time.sleep(POLL_S)
            except OSError as error:
                message = f"the file system of {folder.path} takes no locks: {error.strerror}"
                hint = "mount it with locks (Lustre: -o flock), or name a folder on another one with --output"
                raise UserError(Problem(kind="no-locks", message=message, hint=hint, where="--output")) from None
        yield
