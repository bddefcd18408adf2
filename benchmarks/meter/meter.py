"""An exact meter of the bytes that torch allocates on the CPU, kernel scratch and other threads included."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from zerofit.launch.host import ops_folder

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
POLL_S = 0.5


class AllocatorMeter:
    """Bytes that torch's CPU allocator was asked for and has not got back since the meter was put in front of it.

    One a process: what was allocated before is not counted, neither now nor when it is freed. Sizes are as requested,
    or rounded up to `rounding_bytes` (512 counts as CUDA's caching allocator does).
    """

    def __init__(self, rounding_bytes: int = 1):
        self._library = _load()
        self._library.meter_install(rounding_bytes)

    def live(self) -> int:
        """Bytes alive now."""
        return self._library.meter_live_bytes()

    def peak(self) -> int:
        """Most bytes alive since the last reset."""
        return self._library.meter_peak_bytes()

    def reset_peak(self) -> None:
        """Begin to look for a new peak."""
        self._library.meter_reset_peak()


@cache
def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.meter_install.argtypes = [ctypes.c_int64]
    for name in ("meter_live_bytes", "meter_peak_bytes"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def build(show: Callable[[str], None] = print) -> Path:
    """The compiled allocator, from the ops folder's cache where it lies there. Raises RuntimeError without a g++.

    It is compiled once for each source, torch and environment, by one process at a time; takes about half a minute.
    """
    key = hashlib.sha256(f"{SOURCE.read_text()}\n{torch.__version__}".encode()).hexdigest()[:12]
    folder = ops_folder() / "meter"
    library = folder / f"counting_allocator-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not library.exists():
                _compile(library, show)
    return library


def _compile(library: Path, show: Callable[[str], None]) -> None:
    start, aside = time.monotonic(), library.with_suffix(f".{os.getpid()}")
    home = Path(torch.__file__).parent  # torch.utils.cpp_extension would look for a CUDA toolkit, aloud
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    argv = ["g++", *flags, str(SOURCE), "-lc10", "-o", str(aside)]
    try:
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise RuntimeError("the exact meter needs g++ (apt-get install g++)") from None
    while True:
        show(f"compiling the counting allocator ({time.monotonic() - start:.0f} s)")
        try:
            _, errors = process.communicate(timeout=POLL_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if process.returncode:
        raise RuntimeError(f"the counting allocator does not compile:\n{errors}")
    os.replace(aside, library)
