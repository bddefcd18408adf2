"""The cache of prepared data: locks between processes that share it, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root


@contextmanager
def cache_errors(name: str) -> Iterator[None]:
    """Turn an OSError (full disk, missing permission) into a UserError "cache" about the data `name`."""
    try:
        yield
    except OSError as error:
        message = f"{name}: {error.strerror or error}: {error.filename or cache_root()}"
        hint = f"check permissions and free space; ZEROFIT_CACHE=FOLDER sets another cache than {cache_root()}"
        raise UserError(Problem(kind="cache", message=message, hint=hint)) from error


@contextmanager
def waiting_lock(path: Path, text: str, progress: Reporter) -> Iterator[None]:
    """Hold the lock file `path`. `text` ("another process ...") is shown while another process has the lock.

    The operating system releases the lock when a process dies.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with progress.task(f"waiting: {text}", None, ""):
            lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()
