"""`zerofit models`: what can be trained by name."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, out
from zerofit.spec.events import Event


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def models(as_json: bool) -> None:
    """List the models known by name, with parameter counts."""
    answer(_models, as_json, _show)


def _models() -> dict[str, Any]:
    from zerofit.models.build import model_table

    def tell(done: int, total: int) -> None:
        text = "counting parameters on the meta device"
        console(Event(kind="task", text=text, done=done, total=total, unit="models", ended=done == total))

    with EventConsole() as console:
        return {"models": model_table(on_progress=tell)}


def _show(result: dict[str, Any]) -> None:
    table = Table("name", "kind", "parameters", "source")
    table.columns[2].justify = "right"
    for row in result["models"]:
        table.add_row(row["name"], row["kind"], f"{row['parameters']:,}", row["source"])
    out().print(table)
