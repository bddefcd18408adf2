"""`zerofit models`: what can be trained by name."""

from __future__ import annotations

from typing import Any

import click

from zerofit.cli.answer import answer


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def models(as_json: bool) -> None:
    """List the models known by name, with parameter counts."""
    answer(_table, as_json, _show)


def _table() -> dict[str, Any]:
    from rich.progress import Progress

    from zerofit.cli.console import err
    from zerofit.models.build import model_table

    with Progress(console=err(), transient=True) as progress:
        task = progress.add_task("counting parameters on the meta device", total=None)
        return {
            "models": model_table(on_progress=lambda done, total: progress.update(task, completed=done, total=total))
        }


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from zerofit.cli.console import out

    table = Table("name", "kind", "parameters", "source")
    table.columns[2].justify = "right"
    for row in result["models"]:
        table.add_row(row["name"], row["kind"], f"{row['parameters']:,}", row["source"])
    out().print(table)
