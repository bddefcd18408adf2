"""Lock files of op builds: held by a process that lives, or left by one that was killed.

torch 2.14 locks `FOLDER/OP/lock` in the kernel, which forgets the lock with its holder: there is nothing to clear.
Older ones create the file for a build, keep it open, and remove it at the end (torch.utils.file_baton); who finds one
waits for it without a word, for ever if its owner was killed. It does not name its owner, but the kernel knows who has
it open.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

REMOTE = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "afs", "wekafs"}
QUIET_S = 600.0  # without a change, after which a build on another host that shares the folder counts as dead
POLL_S = 0.5


def by_existence() -> bool:
    """Whether the installed torch takes a lock file that exists for a lock that is held."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    return "FileBaton" in (Path(spec.origin).parent / "utils" / "cpp_extension.py").read_text(encoding="utf-8")


def clear(folder: Path, show: Callable[[str], None]) -> None:
    """Remove each lock whose owner is dead, and wait for those whose owner lives."""
    if not by_existence():
        return
    for lock in sorted(folder.glob("*/lock")):
        while lock.exists():
            user = owner(lock)
            if user is None:
                lock.unlink(missing_ok=True)
                break
            show(f"waiting for {user}, which compiles DeepSpeed's {lock.parent.name} op")
            time.sleep(POLL_S)


def owner(lock: Path) -> str | None:
    """Who builds in the lock's folder, in words; None where nobody does any more."""
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _at_work(process.pid, lock.parent):
            return f"process {process.pid}"
    if _file_system(lock.parent) in REMOTE:
        changed = max(_changed(path) for path in (lock.parent, *lock.parent.iterdir()))
        if time.time() - changed < QUIET_S:
            return "another host that shares this folder"
    return None


def _at_work(pid: int, folder: Path) -> bool:
    """Whether a process has the folder as its own or something in it open: its lock, a compiler's output."""
    place = Path(f"/proc/{pid}")
    try:
        links = [place / "cwd", *(place / "fd").iterdir()]
    except OSError:  # ended, or another user's, who cannot write there
        return False
    real = os.path.realpath(folder)
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target == real or target.startswith(real + os.sep):
            return True
    return False


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _file_system(path: Path) -> str:
    """Kind of the file system that a path lies on."""
    real = os.path.realpath(path)
    mounts = [p for p in psutil.disk_partitions(all=True) if os.path.commonpath([real, p.mountpoint]) == p.mountpoint]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""
