"""Memory, limits, tools and processes of this host."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from zerofit.launch.orphans import mark_of, others

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
TOOLS = ("g++", "c++", "nvcc", "ninja", "ssh", "sshd", "pdsh", "srun", "mpirun", "py-spy")
BESIDE = (Path(sys.prefix) / "bin", Path("/usr/local/cuda/bin"), Path("/usr/sbin"), Path("/usr/local/sbin"))
RANKS = ("zerofit.worker", "deepspeed.launcher.launch")


def memory() -> dict[str, int]:
    """Bytes of host memory, total and free, as far as the control group that this process is in allows."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for group in _groups():
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is None:  # version 1
            limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < host.total:
            cache = _statistic(group / "memory.stat", "inactive_file")  # given back by the kernel before it kills
            total, free = min(total, limit), min(free, limit - used + cache)
    return {"total_bytes": total, "free_bytes": max(0, free)}


def _groups() -> list[Path]:
    """Folders of the memory control group and of those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers in ("", "memory"):
            top = Path("/sys/fs/cgroup") / controllers
            here = top / inner.lstrip("/")
            found += [top, *(p for p in (here, *here.parents) if top in p.parents)]
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


def limits() -> dict[str, int | None]:
    """Soft limits of this process, as its children inherit them; None is no limit."""
    found = {name: resource.getrlimit(which)[0] for name, which in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in found.items()}


def shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm, through which NCCL, gloo and loader processes hand on tensors."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def tools() -> dict[str, str | None]:
    """Where each program lies, on PATH or in its usual place."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, BESIDE)])
    return {name: shutil.which(name, path=path) for name in TOOLS}


def strays() -> list[dict[str, Any]]:
    """Processes of zerofit runs and of DeepSpeed's launcher on this host, as far as this user may see them."""
    found = []
    for process in others():
        try:
            run, argv = mark_of(process.pid), process.cmdline()
            if run is None and not any(word in RANKS for word in argv):
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            seconds = time.time() - process.create_time()
            said = {"name": process.name(), "user": process.username(), "seconds": round(seconds)}
        except psutil.Error:
            continue
        found.append({"pid": process.pid, "run": run, "rank": "zerofit.worker" in argv, **said})
    return found


def cores() -> dict[str, Any]:
    """Processor cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return {"usable": min(psutil.cpu_count(logical=False) or usable, usable), "machine": platform.machine()}
