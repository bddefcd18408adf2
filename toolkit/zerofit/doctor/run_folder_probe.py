"""The run folder as this host sees it: writable, roomy, and the same one as the asking command's."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

MARK = ".zerofit-seen-by-"


class RunFolderProbe:
    """One run folder; leaves a file there that the asking command looks for, and takes it away at the end."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self.mark: Path | None = None

    def look(self) -> dict[str, Any]:
        """`same`, `writable` (or an `error`), `free_bytes` of its file system, `mark`: the file that was left there."""
        there = self.folder.is_dir()
        same = there and (self.folder / self.token).is_file()
        nearest = next(p for p in (self.folder, *self.folder.absolute().parents) if p.is_dir())
        found = {"exists": there, "same": same, "free_bytes": shutil.disk_usage(nearest).free, "error": None}
        mark = nearest / f"{MARK}{uuid.uuid4().hex}"
        try:
            with mark.open("xb") as file:
                file.write(b"zerofit\n")
                os.fsync(file.fileno())
        except OSError as error:
            return found | {"writable": False, "mark": None, "error": error.strerror}
        if same:
            self.mark = mark
        else:
            mark.unlink(missing_ok=True)
        return found | {"writable": True, "mark": mark.name if same else None}

    def clear(self) -> None:
        """Take away what was left there."""
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)


def left_token(folder: Path) -> Path:
    """A file of the asking command's in its run folder, by which others know it. Raises OSError."""
    token = folder / f".zerofit-asks-{uuid.uuid4().hex}"
    token.touch(exist_ok=False)
    return token
