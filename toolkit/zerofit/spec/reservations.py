"""Memory that runs on this machine have reserved: what a run that was just started will take counts as taken.

Each run has a file in the cache, under the machine's boot id, since hosts may share the cache. A file counts while the
process that wrote it lives.
"""

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

RANK = "zerofit.worker"  # in the command line of each rank, which ends with its run folder
CLOCK_S = 2.0  # by which two looks at a start can differ where the clock is set
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The memory of one run on this machine, in bytes, and the process that keeps it."""

    run: str  # the run folder
    host_bytes: int  # of all its ranks here, without pages of libraries
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)  # by the GPU's uuid
    pid: int = 0
    started: float = 0.0  # of that process, so that a later one with its number is another


def read_forecast(run: Path) -> dict[str, Any] | None:
    """Return the `spec.run_folder.MemoryForecast` of a run folder's plan.json as plain data, without pydantic.

    None where memory was not forecast.
    """
    try:
        return read_json(run / "plan.json").get("forecast")
    except (OSError, Unreadable):
        return None


def needed_by(ranks: Iterable[int], world_size: int, forecast: Mapping[str, Any]) -> list[int]:
    """Return the host memory that each of these ranks needs by the forecast."""
    stages, first = forecast["stages"], forecast["first_bytes"]
    return [stages[rank * len(stages) // world_size] if rank else first for rank in ranks]


def reserve(run: Path, host_bytes: int, gpu_bytes: Mapping[str, int]) -> None:
    """Reserve memory for a run, as long as this process lives or until `release`."""
    own = psutil.Process()
    kept = Reservation(
        run=str(run), host_bytes=host_bytes, gpu_bytes=dict(gpu_bytes), pid=own.pid, started=own.create_time()
    )
    with suppress(OSError):  # a cache that cannot be written reserves nothing
        _folder().mkdir(parents=True, exist_ok=True)
        write_json(_file(run), asdict(kept))


def release(run: Path) -> None:
    """Give back what this process has reserved for a run."""
    kept = _read(_file(run))
    if kept and kept.pid == os.getpid():
        _file(run).unlink(missing_ok=True)


def is_reserved(run: Path) -> bool:
    """Return whether a living process has reserved memory for a run on this machine."""
    return any(one.run == str(run) for one in _living())


def host_claims(but: Path | None = None) -> int:
    """Return the bytes of host memory that runs have reserved and not taken yet, without those of the run `but`."""
    kept = [one for one in _living() if one.run != str(but)]
    taken = _taken() if kept else Counter[str]()
    return sum(max(0, one.host_bytes - taken[one.run]) for one in kept)


def beside_reserved(size: int) -> str:
    """Return what a message about free memory adds where other runs have reserved some of it."""
    return f" ({shown_bytes(size)} are reserved by other runs)" if size else ""


def free_for(run: Path | None = None) -> int:
    """Return the bytes of host memory that a run may take: what is free, and what its ranks have taken already.

    What other runs have reserved and not taken yet is not free.
    """
    taken = _taken()[str(run)] if run else 0
    return max(0, host_memory()[1] + taken - host_claims(but=run))


def gpu_claims(but: Path | None = None) -> Counter[str]:
    """Return the bytes that runs have reserved of each GPU, whether taken yet or not, without those of the run `but`.

    What is free of a GPU is therefore at most what it has less this.
    """
    found = Counter[str]()
    for one in _living():
        if one.run != str(but):
            found.update(one.gpu_bytes)
    return found


def gpus_free_for(run: Path, count: int) -> list[int]:
    """Return the bytes of each of the first `count` GPUs that a run may take; none where there is no nvidia-smi."""
    claims = gpu_claims(but=run)
    return [max(0, min(gpu.free_bytes, gpu.total_bytes - claims[gpu.uuid])) for gpu in gpu_memory(count)]


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let no other run look at what is free before this one has reserved its part."""
    with ExitStack() as stack:
        with suppress(OSError):  # no place for it, or a file system without locks
            _folder().mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((_folder() / "lock").open("w")), fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else "any"
    return cache_root() / "reserved" / boot


def _file(run: Path) -> Path:
    return _folder() / f"{hashlib.sha256(str(run).encode()).hexdigest()[:24]}.json"


def _read(file: Path) -> Reservation | None:
    try:
        return Reservation(**read_json(file))
    except (OSError, Unreadable, TypeError):  # taken back just now, or of another version
        return None


def _living() -> list[Reservation]:
    """Return the reservations whose process lives; the files of others are removed."""
    found = []
    for file in _folder().glob("*.json"):
        kept = _read(file)
        if kept and _lives(kept):
            found.append(kept)
        else:
            file.unlink(missing_ok=True)
    return found


def _lives(kept: Reservation) -> bool:
    try:
        return abs(psutil.Process(kept.pid).create_time() - kept.started) < CLOCK_S
    except psutil.Error:
        return False


def _taken() -> Counter[str]:
    """Return the private bytes of all ranks on this machine, by their run folder."""
    found = Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, IndexError):
            argv = process.cmdline()
            if RANK in argv:
                memory = process.memory_info()
                found[argv[-1]] += memory.rss - memory.shared
    return found
