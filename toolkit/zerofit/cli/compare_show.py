"""What `zerofit compare` prints for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from zerofit.cli.console import out
from zerofit.report.compare_page import COLUMNS, FIRST, cells

STYLES = {"failed": "red", "not-here": "dim"}


def show_strategies(result: dict[str, Any]) -> None:
    """All strategies; those that could not run with their reason below."""
    console = _table(result)
    for row in result["rows"]:
        if row.get("agrees") is False:
            words = f"{row['strategy']}: weights differ from the single device's by {row['max_weight_difference']:.1e}"
            words += "; batch norm over each rank's own share does that" if row["batch_norm"] else ""
            console.print(words, style="yellow")
        if row.get("staleness"):
            stale = row["staleness"]
            words = (
                f"{row['strategy']}: staleness {sum(stale) / len(stale):.2f} updates on average, {max(stale)} at most"
            )
            console.print(words)
    _files(console, result)


def show_sizes(result: dict[str, Any]) -> None:
    """All runs, each size over its seeds, which one was first, and where larger ones stop helping."""
    console = _table(result)
    target = f"{result['about']['target']:.1%}"
    table = Table("batch size", f"reached {target}", "seconds to it", "final accuracy", "noise scale")
    for size in result["summary"]:
        seconds, accuracy, noise = (size[name] for name in ("seconds_to_target", "final_accuracy", "noise_scale"))
        row = [f"{size['reached']} of {size['runs']}", _range(seconds, ".1f"), _range(accuracy, ".1%")]
        table.add_row(str(size["batch_size"]), *row, _range(noise, ",.0f"))
    console.print(table)
    console.print(_first(result["summary"], target, result["about"]["epochs"]), style="bold")
    _files(console, result)


def _range(figures: list[float] | None, form: str) -> str:
    """Median (least to most)."""
    return "-" if figures is None else "{0:{3}} ({1:{3}} to {2:{3}})".format(*figures, form)


def _first(summary: list[dict[str, Any]], target: str, epochs: int) -> str:
    sure = [size for size in summary if size["runs"] and size["reached"] == size["runs"]]
    if not sure:
        return f"no batch size reached {target} in {epochs} epochs with every seed: raise --epochs or --lr"
    best = min(sure, key=lambda size: size["seconds_to_target"][0])
    words = f"first at {target}: batch size {best['batch_size']} after {best['seconds_to_target'][0]:.1f} s (median)"
    larger = [size for size in summary if size["batch_size"] > best["batch_size"]]
    return words + (f"; from {larger[0]['batch_size']} on larger ones do not help" if larger else "")


def show_scaling(result: dict[str, Any]) -> None:
    """Weak and strong."""
    _files(_table(result), result)


def _table(result: dict[str, Any]) -> Console:
    console = out(width=170)
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
            console.print(f"{row[FIRST[kind]]}: {row['reason']}", style="dim")
    return console


def _files(console: Console, result: dict[str, Any]) -> None:
    for path in result["written"]:
        console.print(f"written: {path}", soft_wrap=True)
