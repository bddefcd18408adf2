"""`zerofit calibrate`: measure this machine, so that its plans no longer rest on assumptions."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from zerofit.cli.answer import answer

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
    from zerofit.spec.calibration import Calibration, write_calibration
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.local_machine import usable_cores

    cluster = Cluster.here()
    start = time.perf_counter()
    found = _measured(cluster.gpus, max(1, usable_cores() // cluster.gpus), budget_s)
    calibration = Calibration(
        kind=cluster.device.kind,
        device_name=found.pop("device_name") or f"CPU ({platform.machine()})",
        devices=cluster.gpus,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in VERSIONS},
        **found,
    )
    path = write_calibration(calibration)
    return {**asdict(calibration), "file": str(path), "seconds": round(time.perf_counter() - start, 1)}


def _measured(ranks: int, threads: int, budget_s: float) -> dict[str, Any]:
    """What the ranks have measured. Raises RunFailed."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from zerofit.cli.console import err
    from zerofit.doctor.measured import MeasurementJob, measured, together

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("", total=None)
        job = MeasurementJob(ranks=ranks, threads=threads, seconds=budget_s)
        found = measured(job, ranks, lambda phase: bar.update(task, description=phase))
    return {**together(found), "device_name": found[0]["device_name"]}


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from zerofit.cli.console import out

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
    out().print(table)
    click.echo(f"written: {result['file']} in {result['seconds']:.0f} s")
