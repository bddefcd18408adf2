"""`zerofit doctor` and `zerofit calibrate`: whether machines can train, and how fast."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, fitting_table, out, print_facts, print_verdict, show_checks
from zerofit.cli.options import AS_JSON, PATH, Number
from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.launch.hostfile import Host, read_hostfile
from zerofit.spec.events import Reporter
from zerofit.spec.units import counted, shown_rate

FINDING = 1
VERSIONS = ("zerofit", "torch")
REPORTED = ("zerofit", "torch", "deepspeed", "transformers", "accelerate")
BANDWIDTHS = {  # key of --json -> words
    "memory_bandwidth": "memory",
    "host_copy": "copies from host memory",
    "adam_bandwidth": "Adam's step",
    "sgd_bandwidth": "SGD's step",
    "host_bandwidth": "Adam in host memory, all ranks",
    "link": "all-reduce, bus bandwidth",
    "disk_read": "disk, read",
    "disk_write": "disk, write",
}
LATENCIES = {
    "launch_s": "one small op after another",
    "hook_s": "ZeRO-3's hooks, per parameter",
    "gradient_s": "engine overhead, per gradient",
    "link_latency_s": "small all-reduce",
    "call_s": "small all-gathers, many at once",
}


@click.command()
@click.option("--hostfile", type=PATH, help="check all hosts of this file, over ssh")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="ssh port of the hosts [from ~/.ssh/config]")
@click.option("--build-ops", is_flag=True, help="compile DeepSpeed's C++ ops now, for this environment")
@click.option("--quick", is_flag=True, help="skip the measurements")
@click.option("--report", is_flag=True, help="print versions and checks as Markdown for an issue, without measurements")
@AS_JSON
def doctor(
    hostfile: Path | None, ssh_port: int | None, build_ops: bool, quick: bool, report: bool, as_json: bool
) -> None:
    """Check this machine, or all hosts of a hostfile: devices, versions, ops, limits and speeds (about a minute).

    Exit code 1: a check failed.
    """
    # An issue needs versions and checks. Measurements would take a minute.
    show = _show_report if report else _show_findings
    result = answer(lambda: _examine(hostfile, ssh_port, build_ops=build_ops, quick=quick or report), as_json, show)
    if any(check["status"] == "fail" for check in result["checks"]):
        raise SystemExit(FINDING)


def _examine(hostfile: Path | None, ssh_port: int | None, *, build_ops: bool, quick: bool) -> dict[str, Any]:
    from zerofit.doctor.examine import ExamineOptions, examine
    from zerofit.doctor.system import gpus
    from zerofit.spec.local_machine import cpu_ranks, usable_cores

    if hostfile:
        hosts = read_hostfile(hostfile)
    else:
        # Measure with as many ranks as `zerofit train` would start here. Without GPUs, ranks share the cores.
        hosts = (Host("localhost", len(gpus()["gpus"]) or cpu_ranks(usable_cores())),)
    with EventConsole() as console:
        options = ExamineOptions(ssh_port=ssh_port, build_ops=build_ops, measure=not quick)
        checks = examine(hosts, options, Reporter(console).status)
    return {"checks": [asdict(check) for check in checks], "hosts": len(hosts)}


def _show_findings(result: dict[str, Any]) -> None:
    console, checks = out(), [Check(**check) for check in result["checks"]]
    count = {status: sum(check.status == status for check in checks) for status in (FAIL, WARN, OK)}
    total = f"{count[FAIL]} failed, {counted(count[WARN], 'warning')}, {count[OK]} ok"
    print_verdict(console, "NOT READY" if count[FAIL] else "READY", total, good=not count[FAIL])
    show_checks(checks, result["hosts"], console)
    if count[FAIL]:
        following = "follow the advice for what failed, and repeat this command"
    else:
        following = "zerofit calibrate measures the speeds that `zerofit plan`, `tune` and `--fit` use"
    print_facts(console, [("next", following)], 6)


def _show_report(result: dict[str, Any]) -> None:
    """Print the facts for an issue report as Markdown."""
    installed = {package.name.lower(): package.version for package in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in REPORTED)
    print(
        f"{versions}\nPython {platform.python_version()}, {platform.platform()}\n\n| check | | found |\n|---|---|---|"
    )
    for check in result["checks"]:
        # An issue is public: leave out host names, process numbers and the user's home.
        if check["name"] != "processes":
            value = check["value"].replace(str(Path.home()), "~").replace("|", "\\|")
            print(f"| {check['name']} | {check['status']} | {value} |")


@click.command()
@click.option("--seconds", type=Number(min=0), default=0.8, show_default=True, help="seconds for each measurement")
@AS_JSON
def calibrate(seconds: float, as_json: bool) -> None:
    """Measure this machine's speed: kernels, collectives, host copies and the disk (under a minute).

    Kernels are measured by shape, collectives by size. `zerofit plan`, `tune` and `--fit` use these figures for
    this kind of device.
    """
    answer(lambda: _calibrate(seconds), as_json, _show_speeds)


def _calibrate(budget_s: float) -> dict[str, object]:
    """Measure this machine with one rank per device, and write the figures. Raises RunFailed."""
    from zerofit.doctor.measured import MeasurementJob, joined_figures, measured
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.local_machine import Calibration, usable_cores, write_calibration

    # All devices are measured at the same time: they share memory, links and cores, as in a run.
    cluster, versions = Cluster.here(), {name: importlib.metadata.version(name) for name in VERSIONS}
    start = time.perf_counter()
    ranks, threads = cluster.gpus, max(1, usable_cores() // cluster.gpus)
    job = MeasurementJob(ranks=ranks, threads=threads, seconds=budget_s, by_shape=True)
    with EventConsole() as console:
        by_rank = measured(job, ranks, Reporter(console).status)
    about = {
        "kind": cluster.device.kind,
        # torch has names only for GPUs.
        "device_name": by_rank[0]["device_name"] or f"CPU ({platform.machine()})",
        "devices": ranks,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }
    calibration = Calibration.from_dict({**about, **joined_figures(by_rank)})
    path = write_calibration(calibration)
    return {**asdict(calibration), "file": str(path), "seconds": round(time.perf_counter() - start, 1)}


def _rates(kernels: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[list[float], str]]:
    """Return the rates of kernels, one for each shape, and their unit, by (kind, dtype)."""
    rates: dict[tuple[str, str], tuple[list[float], str]] = {}
    for kernel in kernels:
        # Kernels that compute are limited by arithmetic, the others by memory.
        unit = "TFLOP/s" if kernel["flops"] else "GB/s"
        amount = kernel["flops"] / 1e12 if kernel["flops"] else kernel["moved_bytes"] / 1e9
        rates.setdefault((kernel["kind"], kernel["dtype"]), ([], unit))[0].append(amount / kernel["seconds"])
    return rates


def _show_speeds(result: dict[str, Any]) -> None:
    console, rows = out(), list[tuple[str, str]]()
    for (kind, dtype), (rates, unit) in _rates(result["kernels"]).items():
        rows.append((f"{kind} in {dtype}, by shape", f"{min(rates):.3g} to {max(rates):.3g} {unit}"))
    for precision, flops in result["matmul_flops"].items():
        rows.append((f"matrix products in {precision}", f"{flops / 1e12:.3g} TFLOP/s"))
    for names, unit, scale in ((BANDWIDTHS, "GB/s", 1e-9), (LATENCIES, "us", 1e6)):
        known = ((words, result[name]) for name, words in names.items() if result[name] is not None)
        rows += [(words, f"{shown_rate(value * scale)} {unit}") for words, value in known]
    ranks = counted(result["devices"], "rank")
    print_verdict(console, "MEASURED", f"{result['device_name']}, {ranks}")
    table = [{"": words, "one rank reaches": figure} for words, figure in rows]
    console.print(fitting_table(console, table, ("one rank reaches",), tuple(table[0]), ""))
    print_facts(console, [("written", f"{result['file']} in {result['seconds']:.0f} s")], 9)
