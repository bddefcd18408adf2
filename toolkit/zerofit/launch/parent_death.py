"""Processes that end with their parent, so a killed command leaves no ranks training."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from functools import partial

from zerofit.spec.process import run_and_exit

PR_SET_PDEATHSIG = 1  # linux/prctl.h
COMMAND = "zerofit.cli"


def end_with_parent(parent: int | None = None, sent: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send the signal `sent` to this process when its parent ends.

    `parent`: the parent's process id. If the parent has ended already, exit now. Does nothing except on Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    # The kernel sends it when the thread that started this process ends, even if other threads live (prctl(2)). That
    # thread supervises this process, so it lives as long as the command.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sent)
    # the kernel sends nothing if the parent has ended before the call
    if os.getppid() != parent if parent else os.getppid() == 1:
        os._exit(1)


def main() -> None:
    """Run a module that ends when process PID ends.

    `python -m zerofit.launch.parent_death PID MODULE ARGS...`. Ignores SIGUSR1, with which a scheduler asks all
    processes to stop: the ranks handle it and save.
    """
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    module = sys.argv[2]
    if module == COMMAND:  # SIGINT stops a tuning trial, but background jobs of a shell ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = sys.argv[2:]
    run_and_exit(partial(runpy.run_module, module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
