"""Processes of a start that are still there after its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

RUN_ID = "ZEROFIT_RUN"  # in the environment of every process of a start
WAIT_S = 5.0


def others() -> Iterator[psutil.Process]:
    """Return all processes on this host but this one and those that it descends from."""
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    return (process for process in psutil.process_iter() if process.pid not in spared)


def run_id_of(pid: int) -> str | None:
    """Return the run id in a process's environment; None where there is none, or it is another user's process."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    key = f"{RUN_ID}=".encode()
    values = [one[len(key) :] for one in raw.split(b"\0") if one.startswith(key)]
    return os.fsdecode(values[0]) if values else None


def end_all(run_id: str) -> int:
    """Kill every process of a start on this host, but this one and those that it descends from; return how many."""
    found = [process for process in others() if run_id_of(process.pid) == run_id]
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=WAIT_S)
    return len(found)
