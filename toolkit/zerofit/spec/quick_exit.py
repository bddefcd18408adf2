"""Ending a process without taking down, module by module, what it has imported."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def run_and_exit(work: Callable[[], object]) -> None:
    """Run `work` as the last thing this process does, with the exit status that Python would give.

    Exit handlers run and threads are waited for as usual; then the process ends, where Python would search all that
    torch and transformers have made for garbage: 2 to 8 s. (`gc.freeze` spares the search too, but then nanobind, which
    Triton binds with, reports every object that was not collected as a leak.)
    """
    status = 1

    def end() -> None:
        failed = False
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                failed = True
        os._exit(120 if failed and status == 0 else status)

    atexit.register(end)  # before anything that `work` imports, so that it runs after their handlers
    try:
        work()
        status = 0
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
        raise
