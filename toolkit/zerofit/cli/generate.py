"""`zerofit generate`: text that a trained language model writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from zerofit.cli.console import EventConsole
from zerofit.cli.eval import placement_options, run, say
from zerofit.cli.options import run_options
from zerofit.spec.events import Reporter


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
    run(lambda: _generate(ckpt, as_json, options), as_json, _show)


def _generate(ckpt: Path, as_json: bool, options: dict[str, Any]) -> dict[str, Any]:
    say("looking at the model ...")  # importing torch alone takes seconds
    from zerofit.cli.progress import StatusLine
    from zerofit.infer.eval_data import scratch_folder
    from zerofit.infer.generate import generate, working_bytes
    from zerofit.infer.generation_request import make_wish
    from zerofit.infer.limits import read_limits
    from zerofit.infer.saved_model import find_folder
    from zerofit.infer.session import InferenceSession, open_model
    from zerofit.spec.errors import Problems

    problems, progress = Problems(), Reporter(EventConsole())
    if not options["prompt"]:
        problems.add("empty-prompt", "--prompt is empty", "give the text's first words", "--prompt")
    limits = problems.attempt(lambda: read_limits(options["max_memory"]))
    with StatusLine():
        folder = problems.attempt(lambda: find_folder(ckpt, progress))
    problems.raise_if_any()
    with scratch_folder(options["offload_folder"]) as scratch:
        with StatusLine():
            saved, dtype = open_model(folder, options["dtype"], scratch, progress, options["trust_model_code"])
        wish, decode = make_wish(saved, options)
        session = InferenceSession(saved=saved, dtype=dtype, limits=limits, scratch=scratch, progress=progress, say=say)
        working = working_bytes(session.empty, wish, session.main)
        model, placement = session.load(working, "a smaller --max-new-tokens,")
        write = partial(click.echo, nl=False, err=as_json)
        result = generate(model, wish, decode, placement.execution_device, write)
        write("\n")
        return {**result, **session.facts(placement)}


def _show(result: dict[str, Any]) -> None:
    say(f"{result['tokens']} tokens, {result['tokens_per_s']:.1f} tokens/s")
