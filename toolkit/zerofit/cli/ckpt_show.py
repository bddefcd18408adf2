"""The answers of `zerofit ckpt` for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.cli.console import out
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.checkpoints import CheckpointDescription, CheckpointList, CheckpointSummary, VerifyResult
    from zerofit.checkpoint.diff import CheckpointDiff, TensorRow
    from zerofit.checkpoint.export import ExportResult
    from zerofit.checkpoint.universal import ConvertResult
    from zerofit.spec.layout import Layout

WIDTH = 140  # where there is no terminal
FEW = 12  # tensors to print


def show_list(result: CheckpointList) -> None:
    """Print a table, one checkpoint a line."""
    table = Table("step", "samples", "saved", "size", "ranks", "layout", "")
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    good = Text("whole" if result.checked == "checksums" else "files are there", style="green")
    for row in result.checkpoints:
        verdict = good if row.whole else Text(_wrong(row), style="red")
        if row.layout is None:
            table.add_row(str(row.step), *["?"] * 5, verdict)
            continue
        cells = (row.step, row.samples, row.created, shown_bytes(row.bytes or 0), row.world_size)
        table.add_row(*map(str, cells), _layout(row.layout), verdict)
    console = _console()
    console.print(f"{result.folder}")
    console.print(table)
    if result.checked == "sizes":
        console.print("sizes were checked; --deep compares checksums", style="dim")


def show_description(result: CheckpointDescription) -> None:
    """Print the facts of one checkpoint."""
    console = _console()
    console.print(str(result.path), style="bold")
    layout = _layout(result.layout) if result.layout else "?"
    lines = {
        "step": f"{result.step} of {result.steps}, {result.samples} samples seen",
        "saved": f"{result.created}, {shown_bytes(result.bytes or 0)} in {len(result.files)} files",
        "model": f"{result.model} ({result.parameters:,} parameters, {result.task})",
        "data": f"{result.data}",
        "layout": f"{layout} on {result.world_size} rank(s)",
        "training": f"{result.precision}, {result.optimizer}, "
        f"micro batch {result.batch.micro} x {result.batch.accumulation} accumulated",
        "figures": ", ".join(f"{k} {v:.6g}" for k, v in result.figures.items() if isinstance(v, int | float)),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    for name, text in lines.items():
        console.print(f"  {name:<9}{text}")


def show_verdict(result: VerifyResult) -> None:
    """Print that the checkpoint is whole, or every file that is not."""
    verdict = click.style("whole", fg="green") if result.ok else click.style("damaged", fg="red")
    click.echo(f"{result.path}: step {result.step}, {verdict}")
    for problem in result.problems:
        more = f" ({problem.message})" if problem.message else ""
        click.echo(f"  {problem.file}: {problem.kind}{more}")


def show_converted(result: ConvertResult) -> None:
    """Print where it is, and how it is loaded."""
    click.echo(f"{result.out}: universal checkpoint {result.tag}, {shown_bytes(result.bytes)}")
    click.echo('  "checkpoint": {"load_universal": true} in the DeepSpeed JSON, then engine.load_checkpoint(folder)')


def show_export(result: ExportResult) -> None:
    """Print where it is, and its files."""
    click.echo(f"{result.out}: {result.parameters:,} parameters in {result.dtype}")
    for name in result.files:
        click.echo(f"  {name}")


def show_difference(result: CheckpointDiff) -> None:
    """Print names, shapes and the tensors that differ most."""
    console = _console()
    for side, names in ((result.a, result.only_in_a), (result.b, result.only_in_b)):
        for name in names[:FEW]:
            console.print(f"only in {side}: {name}")
        _rest(console, names)
    for name, one, other in result.shapes:
        console.print(f"{name}: shape {list(one)} and {list(other)}")
    apart = result.apart
    if apart:
        console.print(_tensors(apart[:FEW]))
        _rest(console, apart)
    verdict = Text("equal", style="green") if result.equal else Text("different", style="yellow")
    same, compared = len(result.rows) - len(apart), len(result.rows)
    console.print(verdict.append(f": {same} of {compared} tensors are the same bit for bit", style="default"))


def _layout(layout: Layout) -> str:
    """Return a layout as "ZeRO 2, dp 2 x tp 2"."""
    degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "sp": layout.sp}
    shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return f"ZeRO {layout.zero_stage}" + (f", {shown}" if shown else "")


def _tensors(rows: Sequence[TensorRow]) -> Table:
    table = Table("tensor", "kind", "elements that differ", "largest difference", "relative")
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        differ = f"{row.apart:,} of {row.elements:,}"
        table.add_row(row.name, row.kind, differ, _number(row.max_abs), _number(row.max_rel))
    return table


def _rest(console: Console, rows: Sequence[object]) -> None:
    if len(rows) > FEW:
        console.print(f"  ... and {len(rows) - FEW} more (--json lists all)", style="dim")


def _wrong(row: CheckpointSummary) -> str:
    first = f"{row.problems[0].file}: {row.problems[0].kind}"
    return first if len(row.problems) == 1 else f"{first} and {len(row.problems) - 1} more"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _console() -> Console:
    console = out()
    if not console.is_terminal:
        console.width = WIDTH
    return console
