"""`zerofit data`: show the samples of a data set, and the tokens that the model learns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from zerofit.cli.console import EventConsole, answer_watched, out, print_facts, print_verdict
from zerofit.cli.options import AS_JSON, given, run_options
from zerofit.cli.terminal import style

if TYPE_CHECKING:
    from zerofit.app.data_view import DataView, SeenText

FIELDS = ("text_field", "tokenizer", "chat_template", "packing", "seq_len")


@click.command()
@click.argument("path", metavar="PATH")
@click.option("--show", type=click.IntRange(0), default=3, show_default=True, help="samples to show")
@run_options(FIELDS)
@AS_JSON
def data(path: str, show: int, as_json: bool, **options: object) -> None:
    """Show the samples that a language model gets from PATH: a file of text or JSON lines, or a value of --data.

    Learned text is green (between ⟦ and ⟧ without colors); text that is only read is dim.
    Conversations are recognized, rendered, packed and counted as in training. Exit code 2: bad lines, listed by number.
    """

    def look(console: EventConsole) -> DataView:
        from zerofit.app.data_view import look_at_data

        return look_at_data(path, show=show, on_event=console, **given(options))

    answer_watched(look, as_json, _show)


def _show(view: DataView) -> None:
    console, count = out(), f"{view.train_samples:,} samples to train on, {view.valid_samples:,} to validate"
    print_verdict(console, "READABLE" if view.train_samples else "EMPTY", count, good=view.train_samples > 0)
    print_facts(console, [("", note) for note in view.notes], 0, hang=2)
    if view.samples:
        marks = "green" if sys.stdout.isatty() else "between ⟦ and ⟧"
        click.echo(f"the loss counts the text that is {marks}; the model also reads the rest, but does not learn it")
    for number, sample in enumerate(view.samples, 1):
        click.echo(style(f"\nsample {number}", bold=True))
        for place, document in enumerate(sample.documents):
            if place:
                click.echo(style("\n── the next conversation cannot attend to this one ──", fg="cyan"))
            # A document that ends with a line break needs no second one, unless its last mark follows the break.
            painted = "".join(map(_paint, document))
            click.echo(painted, nl=not painted.endswith("\n"))
        if sample.padding:
            click.echo(style(f"({sample.padding:,} tokens of padding)", fg="cyan"))


def _paint(seen: SeenText) -> str:
    """Return a part of a sample, marked if the model learns it."""
    # Brackets mark the learned text where colors would be lost.
    if sys.stdout.isatty():
        return style(seen.text, fg="green") if seen.learned else style(seen.text, dim=True)
    return f"⟦{seen.text}⟧" if seen.learned else seen.text
