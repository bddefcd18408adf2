"""Memory reservations of runs on this machine, against which a new run is checked."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zerofit.spec.files import cache_root, write_json
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.local_machine import gpu_memory, host_memory
from zerofit.spec.units import shown_bytes

# A run that has just started has not allocated its memory yet, so the free memory alone is not enough to decide:
#
#   free for a new run = free now - sum over other runs of max(0, reserved - used by its ranks)
#
# Each run has a file in the cache. Hosts and containers may share the cache, so the file is in a folder for the
# machine's boot and the namespace of its process ids. A file counts while the process that wrote it lives. On a GPU the
# used bytes of a run are unknown, so its whole reservation counts.
RANK = "zerofit.worker"  # in each rank's command line, whose last word is the run folder
CLOCK_S = 2.0  # by which two readings of a start time can differ if the clock is adjusted
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The memory that one run reserves on this machine, and the process that reserved it."""

    run: str  # the run folder
    host_bytes: int  # of all its ranks on this machine, without pages of libraries
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)  # by GPU uuid
    pid: int = 0
    started: float = 0.0  # start time of that process, since process ids are reused


def read_forecast(run: Path) -> dict[str, Any] | None:
    """Return the forecast in a run folder's plan.json as plain data; None if it has none."""
    try:  # plain data, since pydantic takes 0.1 s to import
        return read_json(run / "plan.json").get("forecast")
    except (OSError, Unreadable):
        return None


def needed_by(ranks: Iterable[int], world_size: int, forecast: Mapping[str, Any]) -> list[int]:
    """Return the host memory that `forecast` gives for each of `ranks`, in bytes."""
    stages, first = forecast["stages"], forecast["first_bytes"]
    return [stages[rank * len(stages) // world_size] if rank else first for rank in ranks]


def reserve(run: Path, host_bytes: int, gpu_bytes: Mapping[str, int]) -> None:
    """Reserve memory for a run until `release` or until this process ends."""
    own = psutil.Process()
    reservation = Reservation(
        run=str(run), host_bytes=host_bytes, gpu_bytes=dict(gpu_bytes), pid=own.pid, started=own.create_time()
    )
    with suppress(OSError):  # without a writable cache nothing is reserved
        _folder().mkdir(parents=True, exist_ok=True)
        write_json(_file(run), asdict(reservation))


def release(run: Path) -> None:
    """Release the memory that this process has reserved for a run."""
    reservation = _read(_file(run))
    if reservation and reservation.pid == os.getpid():
        _file(run).unlink(missing_ok=True)


def is_reserved(run: Path) -> bool:
    """Return whether a living process has reserved memory for a run on this machine."""
    return any(reservation.run == str(run) for reservation in _living())


def reserved_on_host(except_run: Path | None = None) -> int:
    """Return the bytes of host memory that other runs have reserved and do not use yet."""
    reservations = [reservation for reservation in _living() if reservation.run != str(except_run)]
    used = _used_by_ranks() if reservations else Counter[str]()
    return sum(max(0, reservation.host_bytes - used[reservation.run]) for reservation in reservations)


def reserved_note(size: int) -> str:
    """Return a phrase about the bytes that other runs have reserved; "" if none."""
    return f" ({shown_bytes(size)} reserved by other runs)" if size else ""


def free_for(run: Path | None = None) -> int:
    """Return the bytes of host memory that a run may use, with those that its ranks already use."""
    used = _used_by_ranks()[str(run)] if run else 0
    return max(0, host_memory()[1] + used - reserved_on_host(except_run=run))


def reserved_on_gpus(except_run: Path | None = None) -> Counter[str]:
    """Return the bytes that other runs have reserved on each GPU (by UUID), used or not."""
    found = Counter[str]()
    for reservation in _living():
        if reservation.run != str(except_run):
            found.update(reservation.gpu_bytes)
    return found


def gpus_free_for(run: Path, count: int) -> list[int]:
    """Return the bytes that a run may use on each of the first `count` GPUs; [] if unknown."""
    reserved = reserved_on_gpus(except_run=run)
    return [max(0, min(gpu.free_bytes, gpu.total_bytes - reserved[gpu.uuid])) for gpu in gpu_memory(count)]


@contextmanager
def reservations_locked() -> Iterator[None]:
    """Make other runs wait within the context before they read the free memory and reserve it."""
    with ExitStack() as stack:
        with suppress(OSError):  # no writable cache, or a file system without locks
            _folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((_folder() / "lock").open("w")), fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else "any"
    namespace = f"-{_PROCESSES.stat().st_ino}" if _PROCESSES.exists() else ""
    return cache_root() / "reserved" / f"{boot}{namespace}"


def _file(run: Path) -> Path:
    return _folder() / f"{hashlib.sha256(str(run).encode()).hexdigest()[:24]}.json"


def _read(file: Path) -> Reservation | None:
    try:
        return Reservation(**read_json(file))
    except (OSError, Unreadable, TypeError):  # just released, or of another version
        return None


def _living() -> list[Reservation]:
    """Return the reservations of living processes. Delete the files of all others."""
    found = []
    for file in _folder().glob("*.json"):
        reservation = _read(file)
        if reservation and _lives(reservation):
            found.append(reservation)
        else:
            with suppress(OSError):  # another user's
                file.unlink()
    return found


def _lives(reservation: Reservation) -> bool:
    try:
        return abs(psutil.Process(reservation.pid).create_time() - reservation.started) < CLOCK_S
    except psutil.Error:
        return False


def _used_by_ranks() -> Counter[str]:
    """Return the private bytes of all ranks on this machine, by run folder."""
    found = Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, IndexError):
            argv = process.cmdline()
            if RANK in argv:
                memory = process.memory_info()
                # Ranks share the pages of libraries. With these pages, each rank would count the libraries again.
                found[argv[-1]] += memory.rss - memory.shared
    return found
