"""`zerofit doctor`: whether machines are fit for training, and what they reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, out
from zerofit.cli.preflight_show import show_checks
from zerofit.doctor.check import Check
from zerofit.launch.hostfile import Host, read_hostfile
from zerofit.spec.events import Reporter

FINDING = 1


@click.command()
@click.option("--hostfile", type=click.Path(path_type=Path), help="look at all its hosts, over ssh")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="of the hosts [default: as ssh is configured]")
@click.option("--build-ops", is_flag=True, help="compile DeepSpeed's C++ ops now, for this environment")
@click.option("--quick", is_flag=True, help="measure nothing")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def doctor(hostfile: Path | None, ssh_port: int | None, build_ops: bool, quick: bool, as_json: bool) -> None:
    """Check this machine, or all hosts of a hostfile: devices, versions, ops, limits, speeds (about a minute).

    Exit code 1: something fails.
    """
    found: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        found.update(_examined(hostfile, ssh_port, build_ops=build_ops, quick=quick))
        return found

    answer(work, as_json, _show)
    if any(check["status"] == "fail" for check in found["checks"]):
        raise SystemExit(FINDING)


def _examined(hostfile: Path | None, ssh_port: int | None, *, build_ops: bool, quick: bool) -> dict[str, Any]:
    from zerofit.doctor.examine import ExamineOptions, examine

    hosts = read_hostfile(hostfile) if hostfile else [_this()]
    with EventConsole() as console:
        options = ExamineOptions(ssh_port=ssh_port, build_ops=build_ops, measure=not quick)
        checks = examine(hosts, options, Reporter(console).status)
    return {"checks": [check.as_dict() for check in checks], "hosts": len(hosts)}


def _this() -> Host:
    """Return this machine with the ranks that `zerofit train` would start on it."""
    from zerofit.doctor.system import gpus
    from zerofit.spec.local_machine import cpu_ranks, usable_cores

    return Host("localhost", len(gpus()["gpus"]) or cpu_ranks(usable_cores()))


def _show(result: dict[str, Any]) -> None:
    checks = [Check(**check) for check in result["checks"]]
    show_checks(checks, result["hosts"], out())
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    warnings = "1 warning" if count["warn"] == 1 else f"{count['warn']} warnings"
    click.echo(f"{count['ok']} ok, {warnings}, {count['fail']} failed")
    click.echo("`zerofit calibrate` measures longer and hands the figures to `zerofit plan`")
