"""Locks of a run folder: one command at a time, and no ranks left from an earlier command."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run_folder import RunFolder

# There are two kernel locks. The kernel releases a lock when its holder dies for any reason:
# - run.lock: exclusive, of the command that supervises the run;
# - ranks.lock: shared by the living ranks. A command locks it exclusively for an instant, to check that no rank is
# left.
PATIENCE_S = 60.0  # seconds; the kernel kills ranks whose command was killed, but a device may delay that
PROBE_S = 3.0  # other commands may hold the lock for an instant to test it
POLL_S = 0.1


def refuse_if_held(folder: RunFolder) -> None:
    """Raise UserError if another command uses this run folder."""
    if folder.lock.exists():
        with _locked(folder.lock, fcntl.LOCK_SH, 0.0, folder, lambda _: None):
            pass


def is_held(folder: RunFolder) -> bool:
    """Return whether a command uses this run folder."""
    try:
        refuse_if_held(folder)
    except UserError:
        return True
    return False


@contextmanager
def held(folder: RunFolder, progress: Callable[[str], None]) -> Iterator[None]:
    """Lock the run folder during the block. Raises UserError if another command has locked it."""
    with _locked(folder.lock, fcntl.LOCK_EX, PROBE_S, folder, progress):
        # left by a killed start: nodes start ranks from a spec while the folder is locked
        folder.launch_spec.unlink(missing_ok=True)
        wait_for_ranks(folder, progress)
        yield


class CommandLock:
    """The lock of a command on its run folder, until `stack` closes."""

    def __init__(self, stack: ExitStack, progress: Callable[[str], None]):
        self.folder: RunFolder | None = None  # the locked folder
        self._stack, self._progress = stack, progress

    def take(self, folder: RunFolder) -> None:
        """Lock the folder. Raises UserError."""
        if self.folder is None:
            self._stack.enter_context(held(folder, self._progress))
            self.folder = folder
        else:  # a restart by the same command
            wait_for_ranks(folder, self._progress)


def wait_for_ranks(folder: RunFolder, progress: Callable[[str], None]) -> None:
    """Wait until no rank of an earlier start is left. Raises UserError if a rank does not end."""
    with _locked(folder.ranks_lock, fcntl.LOCK_EX, PATIENCE_S, folder, progress):
        pass


@contextmanager
def alive(folder: RunFolder) -> Iterator[None]:
    """Mark this rank as running during the block."""
    with _locked(folder.ranks_lock, fcntl.LOCK_SH, PATIENCE_S, folder, lambda _: None):
        yield


@contextmanager
def _locked(
    path: Path, kind: int, patience_s: float, folder: RunFolder, progress: Callable[[str], None]
) -> Iterator[None]:
    deadline = time.monotonic() + patience_s
    # Python's files are closed in programs that this process starts (PEP 446), so none of them keeps the lock.
    with path.open("a+") as file:  # NFS grants shared locks only to readers
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another zerofit is using {folder.path}"
                    hint = "wait for it, stop it (SIGTERM lets it save), or use another --output"
                    raise UserError(Problem(kind="run-busy", message=message, hint=hint, where="--output")) from None
                if path == folder.ranks_lock:
                    progress("waiting for ranks of an earlier start to exit")
                time.sleep(POLL_S)
            except OSError as error:
                message = f"the file system of {folder.path} does not support locks: {error.strerror}"
                hint = "mount it with locks (Lustre: -o flock), or set --output to a folder on another file system"
                raise UserError(Problem(kind="no-locks", message=message, hint=hint, where="--output")) from None
        yield
