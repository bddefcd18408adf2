"""What `zerofit tune` prints for people."""

from __future__ import annotations

from rich.table import Table

from zerofit.cli.console import out
from zerofit.tune.result import TuneResult
from zerofit.tune.search import Regret
from zerofit.tune.trial import Trial

WIDTH = 150  # columns, where standard output is not a terminal
REASON = 60  # characters


def show(result: TuneResult) -> None:
    """Print the trials, the best, and what may have been missed."""
    console = out(WIDTH)
    table = Table("", "configuration")
    for name in ("forecast", "measured", "+-", ""):
        table.add_column(name, justify="right")
    for number, row in enumerate(result.trials, start=1):
        style = "bold green" if row.trial.measured_step_s == result.step_s else None
        table.add_row(str(number), row.configuration, *_figures(row.trial), style=style)
    console.print(table)
    rate = f"{result.samples_per_s:,.0f} samples/s"
    if result.tokens_per_s:
        rate = f"{result.tokens_per_s:,.0f} tokens/s"
    console.print(f"best: {result.step_s:.4f} s a step, {rate}", style="bold")
    console.print(_regret(result.regret))
    for path in result.written:
        console.print(f"written: {path}", soft_wrap=True)


def _figures(trial: Trial) -> tuple[str, ...]:
    forecast = f"{trial.forecast_step_s:.4f} s"
    if trial.measured_step_s is None:
        return forecast, trial.status, "", trial.reason[:REASON]
    spread = "" if trial.spread is None else f"{trial.spread:.1%}"
    return forecast, f"{trial.measured_step_s:.4f} s", spread, "cut short" if trial.cut_short else ""


def _regret(regret: Regret) -> str:
    if regret.untried_step_s is None:
        return "regret: none: every configuration that fits was tried"
    left = f"{regret.untried} configurations were not tried; the best of them is expected to take "
    left += f"{regret.untried_step_s:.4f} s a step"
    gain = f", {regret.gap:.1%} less than the best that was measured" if regret.gap else ", no less than the best"
    return f"regret: {left}{gain}; one chance in twenty that any saves more than {regret.at_most:.1%}"
