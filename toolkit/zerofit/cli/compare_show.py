"""What `zerofit compare` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zerofit.app.comparing.result import Comparison
from zerofit.app.comparing.rows import ScalingRow, SizeRow, SizeSummary, StrategyRow
from zerofit.cli.console import out

STYLES = {"failed": "red", "not-here": "dim"}
WIDTH = 170  # columns, where standard output is not a terminal


def show_strategies(result: Comparison[StrategyRow]) -> None:
    """Print all strategies, and below them why some differ or did not run."""
    console = _print_rows(result)
    for row in result.rows:
        if row.agrees is False:
            words = f"{row.strategy}: weights differ from the single device's by {row.max_weight_difference:.1e}"
            words += "; batch norm over each rank's own share does that" if row.batch_norm else ""
            console.print(words, style="yellow")
        if row.staleness:
            mean, most = sum(row.staleness) / len(row.staleness), max(row.staleness)
            console.print(f"{row.strategy}: staleness {mean:.2f} updates on average, {most} at most")
    _print_files(console, result)


def show_sizes(result: Comparison[SizeRow]) -> None:
    """Print all runs, each size over its seeds, which one was first, and where larger ones stop helping."""
    console, summary = _print_rows(result), result.summary or ()
    target = f"{result.about['target']:.1%}"
    table = Table("batch size", f"reached {target}", "seconds to it", "final accuracy", "noise scale")
    for size in summary:
        row = [f"{size.reached} of {size.runs}", _range(size.seconds_to_target, ".1f")]
        row += [_range(size.final_accuracy, ".1%"), _range(size.noise_scale, ",.0f")]
        table.add_row(str(size.batch_size), *row)
    console.print(table)
    console.print(_first(summary, target, result.about["epochs"]), style="bold")
    _print_files(console, result)


def show_scaling(result: Comparison[ScalingRow]) -> None:
    """Print weak and strong scaling."""
    _print_files(_print_rows(result), result)


def _range(figures: Sequence[float] | None, form: str) -> str:
    """Return "median (least to most)"."""
    return "-" if figures is None else "{0:{3}} ({1:{3}} to {2:{3}})".format(*figures, form)


def _first(summary: Sequence[SizeSummary], target: str, epochs: int) -> str:
    medians = {
        size.batch_size: size.seconds_to_target[0]
        for size in summary
        if size.seconds_to_target and size.reached == size.runs
    }
    if not medians:
        return f"no batch size reached {target} in {epochs} epochs with every seed: raise --epochs or --lr"
    best = min(medians, key=lambda size: medians[size])
    words = f"first at {target}: batch size {best} after {medians[best]:.1f} s (median)"
    larger = [size.batch_size for size in summary if size.batch_size > best]
    return words + (f"; from {larger[0]} on larger ones do not help" if larger else "")


def _print_rows(result: Comparison[Any]) -> Console:
    console = out(WIDTH)
    names, rows = result.table()
    table = Table(*names)
    for column in table.columns[1:]:
        column.justify = "right"
    for row, filled in zip(result.rows, rows, strict=True):
        table.add_row(*filled, style=STYLES.get(row.status))
    console.print(table)
    for row in result.rows:
        if row.status != "ok":
            console.print(f"{result.name_of(row)}: {row.reason}", style="dim")
    return console


def _print_files(console: Console, result: Comparison[Any]) -> None:
    for path in result.written:
        console.print(f"written: {path}", soft_wrap=True)
