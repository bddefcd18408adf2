"""What `zerofit tune` prints for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from zerofit.cli.console import out


def show(result: dict[str, Any]) -> None:
    """The trials, the best, and what may have been missed."""
    console = out(width=150)
    table = Table("", "configuration")
    for name in ("forecast", "measured", "+-", ""):
        table.add_column(name, justify="right")
    best_s = result["best"]["step_s"]
    for number, row in enumerate(result["trials"], start=1):
        mark = "bold green" if row["measured_step_s"] == best_s else None
        table.add_row(str(number), row["configuration"], *_figures(row), style=mark)
    console.print(table)
    best = result["best"]
    rate = (
        f"{best['tokens_per_s']:,.0f} tokens/s" if best["tokens_per_s"] else f"{best['samples_per_s']:,.0f} samples/s"
    )
    console.print(f"best: {best['step_s']:.4f} s a step, {rate}", style="bold")
    console.print(_regret(result["regret"]))
    for path in result["written"]:
        console.print(f"written: {path}", soft_wrap=True)


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    forecast = f"{row['forecast_step_s']:.4f} s"
    if row["status"] != "ok":
        return forecast, row["status"], "", row["reason"][:60]
    spread = "" if row["spread"] is None else f"{row['spread']:.1%}"
    return forecast, f"{row['measured_step_s']:.4f} s", spread, "cut short" if row["cut_short"] else ""


def _regret(regret: dict[str, Any]) -> str:
    if not regret["untried"]:
        return "regret: none: every configuration that fits was tried"
    left = f"{regret['untried']} configurations were not tried; the best of them is expected to take "
    left += f"{regret['untried_step_s']:.4f} s a step"
    gain = f", {regret['gap']:.1%} less than the best that was measured" if regret["gap"] else ", no less than the best"
    return f"regret: {left}{gain}; one chance in twenty that any saves more than {regret['at_most']:.1%}"
