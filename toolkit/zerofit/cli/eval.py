"""`zerofit eval`: how good a trained model is, on GPUs, the CPU or from the disk, wherever it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import FINDING, R, answer, fail
from zerofit.cli.console import EventConsole
from zerofit.cli.options import AS_JSON, TRUST_MODEL_CODE, run_options
from zerofit.spec.precision import PRECISIONS
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.inference import Evaluation

DATA_FIELDS = (
    *("data", "data_root", "download", "text_field", "tokenizer", "image_size", "skip_bad", "seed"),
    *("micro_batch", "seq_len", "eval_samples"),
)


def placement_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where weights may go."""
    for option in (
        AS_JSON,
        TRUST_MODEL_CODE,
        click.option("--dtype", type=click.Choice(PRECISIONS), help="of the weights [as saved]"),
        click.option(
            "--offload-folder",
            type=click.Path(path_type=Path, file_okay=False),
            help="where weights are put that no file holds as they are needed [a temporary folder]",
        ),
        click.option(
            "--max-memory",
            metavar="DEVICE=SIZE,...",
            help="0=20GiB,cpu=60GiB: no device but these (and the disk: disk=0 forbids it) [what is free]",
        ),
    ):
        command = option(command)
    return command


@click.command(name="eval")
@click.argument("ckpt", type=click.Path(path_type=Path))
@run_options(DATA_FIELDS)
@placement_options
def evaluate(ckpt: Path, as_json: bool, **options: Any) -> None:
    """Evaluate CKPT: a run's folder, one of its checkpoints, an exported model, or any Hugging Face model's folder.

    Loss and perplexity of text, loss and accuracy of images, over the validation samples of --data (by default of what
    it was trained on). Exit code 0: done, 1: it does not fit into the memory that it may take, 2: bad input.
    """

    def work() -> Evaluation:
        with EventConsole() as console:
            console.say("looking at the model and the data ...")  # importing torch alone takes seconds
            from zerofit.app.inference import evaluate

            return evaluate(ckpt, on_event=console, **options)

    answer_or_misfit(work, as_json, _show)


def answer_or_misfit(work: Callable[[], R], as_json: bool, show: Callable[[R], None]) -> None:
    """Answer with the work's result, or with exit code 1 where the model does not fit."""
    from zerofit.infer.limits import DoesNotFit

    try:
        answer(work, as_json, show)
    except DoesNotFit as finding:
        fail([finding.problem], FINDING, as_json)


def _show(result: Evaluation) -> None:
    click.echo(f"\n{result.model} on {result.data}: {result.samples:,} samples")
    for name in ("loss", "perplexity", "accuracy", "top5_accuracy"):
        if getattr(result, name) is not None:
            click.echo(f"  {name.replace('_', ' '):<15}{getattr(result, name):.4f}")
    speed = f"{result.samples_per_s:,.1f} samples/s"
    if result.tokens_per_s is not None:
        speed += f", {result.tokens_per_s:,.0f} tokens/s"
    click.echo(f"  {'speed':<15}{speed}")
    on_top = result.peak_host_bytes - result.host_bytes_before
    host = f"{shown_bytes(result.peak_host_bytes)}, {shown_bytes(on_top)} of it for the model"
    click.echo(f"  {'host memory':<15}{host}")
    if result.peak_device_bytes is not None:
        click.echo(f"  {'GPU memory':<15}{shown_bytes(result.peak_device_bytes)}")
