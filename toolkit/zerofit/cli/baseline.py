"""`zerofit simulate --baseline`: what a change adds to the memory, for people and as an annotation of its line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.check_show import workflow_command
from zerofit.cli.options import PATH, Decorator, add_options
from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation

FAIL_ABOVE = 0.01


class Percent(click.ParamType):
    """A share, written like 1% or 0.5%."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse; anything but a number of percent is a usage error (exit code 2)."""
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            self.fail(f"{value!r} is not a percentage such as 1%", param, ctx)
        return share


baseline_options: Decorator = add_options(
    click.option("--baseline", type=PATH, help="output of --json before a change: print what the change adds"),
    click.option(
        "--fail-above",
        type=Percent(),
        metavar="PERCENT",
        help="exit with 1 if the peak grows by more than this, or the run no longer fits [1%]",
    ),
)


def read_asked_baseline(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the simulation to compare with; None without --baseline. Raises UserError before any work."""
    if options["baseline"] is None:
        if options["fail_above"] is not None:
            hint = "name what --json printed before the change"
            message = "--fail-above needs --baseline"
            raise UserError(Problem(kind="usage", message=message, hint=hint, where="--fail-above"))
        return None
    from zerofit.simulate.forecast.baseline import read_baseline

    return read_baseline(options["baseline"])


def annotate(result: Simulation) -> None:
    """Print what a change adds as an annotation of its line, on GitHub only."""
    compared = result.against
    if compared is None or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    kind = "error" if compared.exceeded else "notice"
    properties = {"title": "zerofit simulate"}
    file, _, line = result.peak_at.own.rpartition(":")
    root = Path(os.environ.get("GITHUB_WORKSPACE", ".")).resolve()
    if file and Path(file).resolve().is_relative_to(root):
        properties = {"file": str(Path(file).resolve().relative_to(root)), "line": line, **properties}
    click.echo(workflow_command(kind, compared.because, **properties), err=True)
