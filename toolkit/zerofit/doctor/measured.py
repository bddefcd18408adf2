"""Start the ranks that measure this host, join their figures, and measure disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zerofit.doctor.serve import Say
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.files import cache_root

LIMIT_S = 900
POLL_S = 0.1
Figures = dict[str, Any]  # by name, as a rank writes them in JSON
BYTES = 128 * 2**20
BLOCK = 2**22
AT_MOST = 4  # file systems


@dataclass(frozen=True, kw_only=True)
class MeasurementJob:
    """What one rank has to measure; see `measure`."""

    rank: int = 0
    ranks: int  # ranks of all hosts
    device: int = 0  # index of its GPU
    threads: int
    seconds: float  # duration of each measurement
    folder: str = ""  # folder for the figures and logs of the ranks on this host
    store: tuple[str, int] | None = None  # address and port where ranks of several hosts meet; None: a file in `folder`
    collectives_only: bool = False
    by_shape: bool = False  # also measure kernels and collectives by size, for `zerofit plan`


def measured(first: MeasurementJob, local: int, say: Say, env: Mapping[str, str] | None = None) -> list[Figures]:
    """Run `local` ranks that measure this host, and return the figures of each.

    `first`: the job of the first rank. Raises RunFailed. The disk with zerofit's cache is measured, too.
    """
    cache_root().mkdir(parents=True, exist_ok=True)
    # Linux kills the ranks when this process ends
    command = [sys.executable, "-P", "-m", "zerofit.launch.parent_death", str(os.getpid()), "zerofit.doctor.measure"]
    env = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(dir=cache_root()) as name:
        jobs = [replace(first, rank=first.rank + n, device=n, folder=name) for n in range(local)]
        say(f"starting {local} rank(s)")
        processes = []
        for job in jobs:
            argv = [*command, json.dumps(asdict(job))]
            with (Path(name) / f"rank-{job.rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))
        try:
            _watch(jobs, processes, Path(name), say)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((Path(name) / f"rank-{job.rank}.json").read_text()) for job in jobs]


def _watch(
    jobs: Sequence[MeasurementJob], processes: Sequence[subprocess.Popen[bytes]], folder: Path, say: Say
) -> None:
    """Wait for all ranks. Raises RunFailed when one fails, or after `LIMIT_S`."""
    end = time.monotonic() + LIMIT_S
    # a rank that fails leaves the others waiting in a collective, so its exit ends the loop
    while any(process.poll() is None for process in processes):
        phase = folder / "phase"
        if phase.exists():
            say(f"measuring {phase.read_text()}")
        if time.monotonic() > end or any(process.poll() for process in processes):
            break
        time.sleep(POLL_S)
    codes = {job.rank: process.poll() for job, process in zip(jobs, processes, strict=True)}
    failed = [rank for rank, code in codes.items() if code]
    late = [rank for rank, code in codes.items() if code is None]
    if failed:
        last = (folder / f"rank-{failed[0]}.log").read_text(errors="replace").strip().splitlines()[-1:]
        message = f"rank {failed[0]} could not measure: {''.join(last) or f'exit code {codes[failed[0]]}'}"
        raise RunFailed(Problem(kind="measurement", message=message))
    if late:
        message = f"rank {late[0]} did not finish measuring within {LIMIT_S // 60} minutes"
        raise RunFailed(Problem(kind="measurement", message=message, hint="try again on an idle machine"))


def joined_figures(ranks: Sequence[Figures]) -> Figures:
    """Join the ranks' figures: of each figure, the slowest rank's."""
    first = ranks[0]  # all ranks have the same figures, but only the first one measures the disk

    # Some figures exist only on a GPU, on a CPU, or with several ranks.
    def worst(pick: Callable[[Iterable[float]], float], *names: str) -> Figures:
        return {name: pick(rank[name] for rank in ranks) for name in names if name in first}

    # the other ranks wait for the slowest one
    found = worst(min, "memory_bandwidth", "host_copy", "link", "adam_bandwidth", "sgd_bandwidth")
    found |= worst(max, "launch_s", "hook_s", "gradient_s", "call_s")
    found |= worst(sum, "host_bandwidth")  # ranks share the host's memory
    flops = [rank["matmul_flops"] for rank in ranks]
    found["matmul_flops"] = {precision: min(rank[precision] for rank in flops) for precision in flops[0]}
    for name in ("kernels", "collectives"):
        # All ranks measure the same kernels in the same order, so the rows match by position.
        rows = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
        found[name] = [max(row, key=lambda measurement: measurement["seconds"]) for row in rows]
    return found | {k: first[k] for k in ("link_latency_s", "disk_read", "disk_write") if k in first}


def measure_disk(folder: Path) -> dict[str, float]:
    """Return the speeds of writing a large file and of reading it from the disk, in bytes/s."""
    # Random bytes: a file system that compresses would store zeros almost without writing.
    path, block = folder / "disk", os.urandom(BLOCK)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(BYTES // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written_s = time.perf_counter() - start
    # This must follow fsync: POSIX_FADV_DONTNEED drops only pages that are already on the disk.
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # empties the page cache of this file
        start = time.perf_counter()
        while file.read(BLOCK):
            pass
    read_s = time.perf_counter() - start
    path.unlink()
    return {"disk_write": BYTES / written_s, "disk_read": BYTES / read_s}


def nvme_disks(say: Say) -> dict[str, dict[str, float]]:
    """Measure each NVMe file system that this user can write to. Return figures by mount point.

    A file system on which writing or reading fails is left out.
    """
    mounts: dict[str, str] = {}
    for part in psutil.disk_partitions():
        folder = os.path.isdir(part.mountpoint)  # in a container, files like /etc/hosts are mounted, too
        if "nvme" in os.path.basename(part.device) and folder and os.access(part.mountpoint, os.W_OK):
            mounts.setdefault(part.device, part.mountpoint)
    found = {}
    for mount in list(mounts.values())[:AT_MOST]:
        if psutil.disk_usage(mount).free > 4 * BYTES:
            say(f"measuring {mount}")
            # a full quota or a disk with errors must not lose what other disks and the ranks have measured
            with suppress(OSError), tempfile.TemporaryDirectory(dir=mount, prefix=".zerofit-") as name:
                found[mount] = measure_disk(Path(name))
    return found
