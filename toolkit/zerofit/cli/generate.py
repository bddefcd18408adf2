"""`zerofit generate`: text that a trained language model writes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.console import EventConsole
from zerofit.cli.eval import answer_or_misfit, placement_options
from zerofit.cli.options import run_options
from zerofit.spec.events import Event

if TYPE_CHECKING:
    from zerofit.app.inference import Generation


@click.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="what the text begins with")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.7,
    show_default=True,
    help="0: the likeliest token each time",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="draw among the likeliest tokens that have this probability together",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True, help="of the draws")
@run_options(("tokenizer",))
@placement_options
def generate(ckpt: Path, as_json: bool, **options: Any) -> None:
    """Let CKPT go on after --prompt: a run's folder, one of its checkpoints, or any causal language model's folder.

    The text comes as it is written, on standard output (with --json on standard error). Exit code 0: done, 1: the
    model does not fit into the memory that it may take, 2: bad input.
    """

    def work() -> Generation:
        with ExitStack() as until_text:
            console = until_text.enter_context(EventConsole())
            console.say("looking at the model ...")  # importing torch alone takes seconds
            from zerofit.app.inference import generate

            def on_event(event: Event) -> None:
                if event.kind != "text":
                    console(event)
                    return
                until_text.close()  # progress and text would disturb each other
                click.echo(event.text, nl=False, err=as_json)

            result = generate(ckpt, on_event=on_event, **options)
            click.echo(err=as_json)
            return result

    answer_or_misfit(work, as_json, _show)


def _show(result: Generation) -> None:
    click.echo(f"{result.tokens} tokens, {result.tokens_per_s:.1f} tokens/s", err=True)
