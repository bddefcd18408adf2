"""Atomic file writes: a reader sees the old file or the whole new one, and a failed write leaves the old one."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, and is removed when the block fails.

    The file has the permissions `mode`, else those of the file that it replaces, else what the umask leaves. On return
    file and folder are flushed to the disk. Raises OSError that names `path`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # processes of other hosts write here too
    try:
        if mode is None and path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_write(path, mode=mode) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, mode: int | None = None) -> None:
    """Write indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", mode=mode)


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where its file system knows how to."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
