"""Files for people to look at and hand in: written once, never over another."""

from __future__ import annotations

import os
from pathlib import Path

from zerofit.spec.errors import Problem, UserError


def write_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Write a text file (UTF-8) and return whether it is new; `mode` is cut by the umask.

    Raises UserError rather than changing a file that differs.
    """
    data = text.encode()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        return True
    except FileExistsError:
        if path.is_file() and path.read_bytes() == data:
            return False
        message = f"{path} exists already and holds something else"
        raise UserError(
            Problem(kind="output-exists", message=message, hint="remove it, or write to another file", where=str(path))
        ) from None
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise UserError(
            Problem(kind="unwritable", message=message, hint="name a file in a folder that exists", where=str(path))
        ) from None
