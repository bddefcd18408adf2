"""Staging: a folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.checkpoint.store import sync_folders
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import sync_file, sync_folder
from zerofit.spec.units import shown_bytes

SPARE_BYTES = 1 << 24  # for what stands beside the weights


def refuse_existing(out: Path, where: str = "OUT") -> None:
    """Raise UserError "output-exists" unless nothing, or an empty folder, stands at `out`."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        hint = "name a folder that does not exist yet"
        raise UserError(Problem(kind="output-exists", message=f"{out} exists already", hint=hint, where=where))


def refuse_small_disk(out: Path, needed_bytes: int, where: str = "OUT") -> None:
    """Raise UserError "disk-full" where so many bytes would not fit on the disk of `out`."""
    there = next(path for path in (out, *out.parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, needed_bytes + SPARE_BYTES
    if free < needed:
        message = f"{shown_bytes(needed)} are to be written, {shown_bytes(free)} are free at {there}"
        raise UserError(Problem(kind="disk-full", message=message, hint="name a folder on another disk", where=where))


@contextmanager
def staged_folder(out: Path, where: str = "OUT") -> Iterator[Path]:
    """Give a folder to write into; on success it is synced and becomes `out`, otherwise nothing is left of it."""
    refuse_existing(out, where)
    out = out.absolute()
    staging = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                sync_file(path)
        sync_folders(staging)
        os.rename(staging, out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        message = f"{out} cannot be written: {error.strerror or error}"
        hint = "is there room on the disk, and may you write there?"
        raise UserError(Problem(kind="output-unwritable", message=message, hint=hint, where=where)) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
