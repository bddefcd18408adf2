"""Peak memory of this process and of its GPUs."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's names for them
_LARGE = 1 << 20  # bytes


def return_freed_memory_at_once() -> None:
    """Return large blocks to the system as soon as they are freed (glibc; elsewhere nothing happens).

    By default glibc raises that limit to 32 MiB as it sees such blocks freed, and then keeps gaps between smaller ones:
    some 200 MB after a few forwards of a language model.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _LARGE)
            mallopt(_TRIM_THRESHOLD, _LARGE)


def start_counting(gpus: Iterable[int]) -> int:
    """Forget former peaks, of these GPUs too, and return the resident memory of this process now, in bytes."""
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    try:
        _RESET.write_text("5")  # sets the high-water mark to what is resident
    except OSError:
        return peak_host_bytes()  # not allowed here: the peak is that of the whole process
    return _status("VmRSS")


def peak_host_bytes() -> int:
    """Return the most that was resident since `start_counting`, with interpreter, libraries and mapped files."""
    if _STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_device_bytes(gpus: Iterable[int]) -> int | None:
    """Return the most that was allocated on one of these GPUs since `start_counting`; None where there are none."""
    return max((torch.cuda.max_memory_allocated(gpu) for gpu in gpus), default=None)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) << 10 if found else 0
