"""How fast disks are: the one that a folder lies on, and NVMe file systems that this user may write to."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

BYTES = 128 * 2**20
BLOCK = 2**22
AT_MOST = 4  # file systems


def measure_disk(folder: Path) -> dict[str, float]:
    """Bytes a second of one large file, written through to the disk and read back without the page cache."""
    path, block = folder / "disk", os.urandom(BLOCK)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(BYTES // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written_s = time.perf_counter() - start
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while file.read(BLOCK):
            pass
    read_s = time.perf_counter() - start
    path.unlink()
    return {"disk_write": BYTES / written_s, "disk_read": BYTES / read_s}


def nvme_disks(say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Figures of each NVMe file system, by where it is mounted; those that this user cannot write to are left out."""
    mounts: dict[str, str] = {}
    for part in psutil.disk_partitions():
        if "nvme" in os.path.basename(part.device) and os.access(part.mountpoint, os.W_OK):
            mounts.setdefault(part.device, part.mountpoint)
    found = {}
    for mount in list(mounts.values())[:AT_MOST]:
        if psutil.disk_usage(mount).free > 4 * BYTES:
            say(f"measuring {mount}")
            with tempfile.TemporaryDirectory(dir=mount, prefix=".zerofit-") as name:
                found[mount] = measure_disk(Path(name))
    return found
