"""`zerofit calibrate`: measure this machine, so that its plans no longer rest on assumptions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer

LIMIT_S = 300
VERSIONS = ("zerofit", "torch")


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0), default=0.8, show_default=True, help="of each measurement")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def calibrate(seconds: float, as_json: bool) -> None:
    """Measure matrix products, memory, collectives, host copies and the disk of this machine (half a minute).

    `zerofit plan` uses the figures for this machine's kind of device.
    """
    answer(lambda: _calibrate(seconds), as_json, _show)


def _calibrate(budget_s: float) -> dict[str, Any]:
    from zerofit.cli.plan_hardware import Asked, clusters
    from zerofit.launch.machine import usable_cores
    from zerofit.spec.calibration import Calibration, write_calibration

    (cluster,) = clusters(Asked())
    start = time.perf_counter()
    ranks = _measured(cluster.gpus, max(1, usable_cores() // cluster.gpus), budget_s)
    calibration = Calibration(
        kind=cluster.device.kind,
        device_name=ranks[0]["device_name"] or f"CPU ({platform.machine()})",
        devices=cluster.gpus,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in VERSIONS},
        **_together(ranks),
    )
    path = write_calibration(calibration)
    return {**asdict(calibration), "file": str(path), "seconds": round(time.perf_counter() - start, 1)}


def _measured(ranks: int, threads: int, budget_s: float) -> list[dict[str, Any]]:
    """What each rank has measured. Raises RunFailed."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=_room()) as name,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        folder = Path(name)
        task = bar.add_task(f"starting {ranks} rank(s)", total=None)
        processes = [_start(rank, ranks, threads, budget_s, folder) for rank in range(ranks)]
        try:
            _watch(processes, folder, lambda phase: bar.update(task, description=f"measuring {phase}"))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _room() -> Path:
    """The disk that is measured is the cache's."""
    from zerofit.spec.cache import cache_root

    cache_root().mkdir(parents=True, exist_ok=True)
    return cache_root()


def _start(rank: int, ranks: int, threads: int, budget_s: float, folder: Path) -> subprocess.Popen[bytes]:
    arguments = map(str, (rank, ranks, threads, budget_s, folder))
    command = [sys.executable, "-m", "zerofit.simulate.calibrate", *arguments]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _watch(processes: list[subprocess.Popen[bytes]], folder: Path, say: Any) -> None:
    """Wait for all; the first that fails ends the measurement. Raises RunFailed."""
    from zerofit.spec.errors import Problem, RunFailed

    end = time.perf_counter() + LIMIT_S
    while any(process.poll() is None for process in processes):
        phase = folder / "phase"
        if phase.exists():
            say(phase.read_text())
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.perf_counter() > end:
            rank = failed[0] if failed else 0
            last = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-1:]
            message = f"rank {rank} could not measure: {''.join(last) or 'it hangs'}"
            raise RunFailed(Problem(kind="calibration", message=message, where="zerofit calibrate"))
        time.sleep(0.1)


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank counts, as the others wait for it; host memory is shared by all."""
    names = ("memory_bandwidth", "host_copy", "link")
    found = {name: min(one[name] for one in ranks) for name in names if name in ranks[0]}
    found["matmul_flops"] = {
        precision: min(one["matmul_flops"][precision] for one in ranks) for precision in ranks[0]["matmul_flops"]
    }
    found["launch_s"] = max(one["launch_s"] for one in ranks)
    found["host_bandwidth"] = sum(one["host_bandwidth"] for one in ranks)
    return found | {k: ranks[0][k] for k in ("link_latency_s", "disk_read", "disk_write") if k in ranks[0]}


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{result['device_name']} ({result['devices']} ranks)", "one rank reaches")
    table.columns[1].justify = "right"
    for precision, flops in result["matmul_flops"].items():
        table.add_row(f"matrix products in {precision}", f"{flops / 1e12:.3g} TFLOP/s")
    rows = {
        "memory_bandwidth": "memory",
        "host_copy": "copies from host memory",
        "host_bandwidth": "Adam in host memory, all ranks",
        "link": "all-reduce, bus bandwidth",
        "disk_read": "disk, read",
        "disk_write": "disk, write",
    }
    for name, words in rows.items():
        if result[name] is not None:
            table.add_row(words, f"{result[name] / 1e9:.3g} GB/s")
    for name, words in {"launch_s": "one op after the other", "link_latency_s": "small all-reduce"}.items():
        if result[name] is not None:
            table.add_row(words, f"{result[name] * 1e6:.3g} us")
    Console().print(table)
    click.echo(f"written: {result['file']} in {result['seconds']:.0f} s")
