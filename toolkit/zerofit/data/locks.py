"""Locks between processes: one works, the others wait and say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.spec.events import Reporter


@contextmanager
def waiting_lock(path: Path, text: str, progress: Reporter) -> Iterator[None]:
    """Hold the lock file `path`. `text` ("another process ...") is shown while somebody else holds it.

    The operating system drops the lock of a process that dies, however it dies.
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
