"""What `zerofit compare` prints for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from zerofit.report.compare_page import COLUMNS, FIRST, cells

STYLES = {"failed": "red", "not-here": "dim"}


def show_strategies(result: dict[str, Any]) -> None:
    """All strategies; those that could not run with their reason below."""
    console = _table(result)
    for row in result["rows"]:
        if row.get("agrees") is False:
            words = f"{row['strategy']}: weights differ from the single device's by {row['max_weight_difference']:.1e}"
            console.print(f"{words}; batch norm over each rank's own share does that", style="yellow", highlight=False)
        if row.get("staleness"):
            stale = row["staleness"]
            words = (
                f"{row['strategy']}: staleness {sum(stale) / len(stale):.2f} updates on average, {max(stale)} at most"
            )
            console.print(words, highlight=False)
    _files(console, result)


def show_sizes(result: dict[str, Any]) -> None:
    """All runs, and which size was first."""
    console = _table(result)
    reached = [row for row in result["rows"] if row.get("seconds_to_target")]
    target = f"{result['about']['target']:.1%}"
    if reached:
        first = min(reached, key=lambda row: row["seconds_to_target"])
        words = f"first at {target}: batch size {first['batch_size']} after {first['seconds_to_target']:.1f} s"
    else:
        words = f"no batch size reached {target} in {result['about']['epochs']} epochs: raise --epochs or --lr"
    console.print(words, style="bold", highlight=False)
    _files(console, result)


def show_scaling(result: dict[str, Any]) -> None:
    """Weak and strong."""
    _files(_table(result), result)


def _table(result: dict[str, Any]) -> Console:
    console = Console(width=None if Console().is_terminal else 170)
    kind = result["kind"]
    table = Table(FIRST[kind].replace("_", " "), *(label for label, _, _ in COLUMNS[kind]))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["rows"]:
        filled = cells(kind, row) if row["status"] == "ok" else [row["status"]]
        table.add_row(str(row[FIRST[kind]]), *filled, style=STYLES.get(row["status"]))
    console.print(table)
    for row in result["rows"]:
        if row["status"] != "ok":
            console.print(f"{row[FIRST[kind]]}: {row['reason']}", style="dim", highlight=False)
    return console


def _files(console: Console, result: dict[str, Any]) -> None:
    for path in result["written"]:
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
