"""`zerofit train`: a model learns on data, through the DeepSpeed engine, on all local devices."""

from __future__ import annotations

from typing import Any

import click

from zerofit.app.requests import read_request
from zerofit.app.training_result import TrainingResult
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.options import run_options

# `zerofit train` alone: small enough for two CPU cores and four minutes
DEFAULT_JOB = {
    "model": "llama-tiny",
    "data": "pysource",
    "ds_config": "zero2",
    "steps": 400,
    "micro_batch": 8,
    "seq_len": 256,
    "lr": 3e-3,
    "eval_every": 200,
    "eval_samples": 256,
}


@click.command()
@click.argument("target", metavar="[MODEL | RUN.yaml | RUN_FOLDER]", required=False)
@run_options()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def train(target: str | None, as_json: bool, **options: Any) -> None:
    """Train MODEL on --data, or what RUN.yaml (or a run folder's run.json) says; a flag overrides the file.

    A run folder, or a --output that holds this run already: training goes on from its newest checkpoint. SIGTERM and
    SIGUSR1 save one and end with exit code 75. Without arguments: a small Llama learns the Python standard library's
    source code.
    """
    answer(lambda: _train(target, {k: v for k, v in options.items() if v is not None}), as_json, show)


def _train(target: str | None, flags: dict[str, Any]) -> TrainingResult:
    asked = read_request(target, flags if target or flags else DEFAULT_JOB)
    with EventConsole(asked.run.log_every) as console:
        console.say("checking the run, the model and the data ...")  # importing torch alone takes seconds
        from zerofit.app.training import train as train_here

        return train_here(asked, on_event=console, handle_signals=True)


def show(result: TrainingResult) -> None:
    """Print what a training has come to."""
    layout = " x ".join(f"{k} {v}" for k, v in result.layout.items() if v > 1 or k == "zero_stage")
    click.echo(f"\n{result.steps} steps on {result.world_size} rank(s) ({layout.replace('_', ' ')})")
    click.echo(f"  training loss    {result.train_loss:.4f}")
    for name, value in result.eval.items():
        click.echo(f"  validation {name:<11}".ljust(19) + f"{value:.4f}")
    if result.unigram_entropy_nats is not None:
        entropy = result.unigram_entropy_nats
        click.echo(
            f"  unigram entropy  {entropy:.4f}  (the loss of a model that only knows how often each token occurs)"
        )
    if result.sample:
        click.echo("\nA sample of what it writes:\n")
        click.echo("\n".join("    " + line for line in result.sample.splitlines()))
    click.echo(f"\nrun folder: {result.run_dir}")
