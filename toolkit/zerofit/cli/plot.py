"""`zerofit plot`: loss, throughput and memory of one or more runs as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from zerofit.cli.answer import answer


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs.png"), help="picture to write [runs.png]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def plot(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Draw loss, throughput and memory of run folders into one PNG."""
    from zerofit.report.plot import draw

    answer(lambda: draw(list(runs), out), as_json, lambda result: click.echo(result["picture"]))
