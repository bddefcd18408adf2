"""The run folder over all hosts: one folder, writable, with room for checkpoints."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.spec.units import shown_bytes

MARK = ".zerofit-seen-by-"
Facts = dict[str, dict[str, Any]]


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


def disk(facts: Facts, checkpoint_bytes: int | None) -> list[Check]:
    """Room for checkpoints where the run folder is."""
    if checkpoint_bytes is None:
        return []
    return [_room(host, one["run_folder"]["free_bytes"], checkpoint_bytes) for host, one in facts.items()]


def _room(host: str, free: int, checkpoint_bytes: int) -> Check:
    short = f"{shown_bytes(free)} free, a checkpoint takes {shown_bytes(checkpoint_bytes)}"
    tight = free < 2 * checkpoint_bytes  # the new one is written before the old one is removed
    status, good = FAIL if free < checkpoint_bytes else WARN, f"{shown_bytes(free)} free"
    expected, hint = "room for two checkpoints", "free some, or name another --output"
    return check("disk", host, short if tight else "", good, status, expected=expected, hint=hint)


def folders(facts: Facts, folder: Path, seen: set[str]) -> list[Check]:
    """Whether the run folder is one folder that all hosts can write to; `seen`: whose files have come up here."""
    found = []
    for host, one in facts.items():
        there = one["run_folder"]
        problem, hint = "", "name a folder on a file system that all hosts share with --output"
        if not there["same"]:
            problem = f"not shared: {folder} there is {'another folder' if there['exists'] else 'missing'}"
        elif not there["writable"]:
            problem = f"{folder} cannot be written there: {there['error']}"
            hint = "give your user there the right to write"
        elif host not in seen:
            problem = f"not shared: what is written to {folder} there does not appear here"
        good = "shared and writable"
        expected = "one folder for all hosts: checkpoints and logs of all ranks come together in it"
        found.append(check("run-folder", host, problem, good, expected=expected, hint=hint))
    return found
