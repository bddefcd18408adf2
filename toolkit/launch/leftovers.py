"""Processes of a start that are still there after its end."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

MARK_NAME = "ZEROFIT_RUN"  # in the environment of every process of a start
WAIT_S = 5.0


def end_all(mark: str) -> int:
    """Kill every process on this host that bears the mark of a start, but for this one and those that it descends
    from; how many there were."""
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in spared and process.environ().get(MARK_NAME) == mark:
                found.append(process)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=WAIT_S)
    return len(found)
