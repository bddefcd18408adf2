"""`python -m zerofit.launch.build PARENT OP`: compile one of DeepSpeed's ops; ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import psutil

from zerofit.launch.parent_death import PR_SET_PDEATHSIG


def end_session(session: int) -> None:
    """Kill every process of a session: ninja puts each compiler into a process group of its own."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.pid != os.getpid():
                process.kill()
        except (OSError, psutil.Error):
            continue


def _end(*_: object) -> None:
    end_session(os.getpid())
    os._exit(1)


def _end_with(parent: int) -> None:
    """Have the kernel say when the parent ends, however it does; Linux only."""
    signal.signal(signal.SIGTERM, _end)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def main(parent: int, op: str) -> None:
    """Compile, or find compiled; an AssertionError where this machine lacks what it needs."""
    _end_with(parent)
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()  # DeepSpeed annotates nothing of it
    builder = accelerator.get_op_builder(op)()
    assert builder.is_compatible(verbose=True), f"{op} is not compatible with this machine"
    builder.load()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
