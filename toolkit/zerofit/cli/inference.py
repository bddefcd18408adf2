"""`zerofit eval` and `zerofit generate`: a trained model used, on GPUs, the CPU or from the disk, wherever it fits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.options import AS_JSON, PATH, TRUST_MODEL_CODE, add_options, run_options
from zerofit.cli.terminal import write_data
from zerofit.spec.events import Event
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.inference import Evaluation, Generation

DATA_FIELDS = (
    *("data", "data_root", "download", "text_field", "tokenizer", "chat_template", "packing", "image_size", "skip_bad"),
    *("stream", "seed", "micro_batch", "seq_len", "eval_samples"),
    *("pair_field", "label_field", "target_len", "generate_samples"),
)
HEAD_SCORES = ("macro_f1", "micro_f1", "rouge1", "rouge2", "rouge_l")
OFFLOAD_HELP = "where weights are put that no file holds as they are needed [a temporary folder]"
MEMORY_HELP = "0=20GiB,cpu=60GiB: no device but these (and the disk: disk=0 forbids it) [what is free]"
TEMPERATURE_HELP = "0: the likeliest token each time"
TOP_P_HELP = "draw among the likeliest tokens that have this probability together"
placement_options = add_options(  # where weights may go
    click.option("--max-memory", metavar="DEVICE=SIZE,...", help=MEMORY_HELP),
    click.option("--offload-folder", type=click.Path(path_type=Path, file_okay=False), help=OFFLOAD_HELP),
    click.option("--dtype", type=click.Choice(PRECISIONS), help="of the weights [as saved]"),
    TRUST_MODEL_CODE,
    AS_JSON,
)


@click.command(name="eval")
@click.argument("ckpt", type=PATH)
@run_options(DATA_FIELDS)
@placement_options
def evaluate(ckpt: Path, as_json: bool, **options: Any) -> None:
    """Evaluate CKPT: a run's folder, one of its checkpoints, an exported model, or any Hugging Face model's folder.

    Loss and perplexity of text, loss and accuracy of images (of masks also mean IoU), F1 of labelled text, ROUGE of
    what an encoder-decoder writes, over the validation samples of --data (by default of what it was trained on).

    Exit code 0: done, 1: it does not fit into the memory that it may take, 2: bad input.
    """

    def work() -> Evaluation:
        with EventConsole() as console:
            console.say("looking at the model and the data ...")  # importing torch alone takes seconds
            from zerofit.app.inference import evaluate

            return evaluate(ckpt, on_event=console, **options)

    answer(work, as_json, _show_scores)


def _show_scores(result: Evaluation) -> None:
    click.echo(f"\n{result.model} on {result.data}: {result.samples:,} samples")
    for name in ("loss", "perplexity", "accuracy", "top5_accuracy", "mean_iou", *HEAD_SCORES):
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


@click.command()
@click.argument("ckpt", type=PATH)
@click.option("--prompt", required=True, help="what the text begins with")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True, help=TEMPERATURE_HELP)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help=TOP_P_HELP)
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
                write_data(event.text, err=as_json)

            result = generate(ckpt, on_event=on_event, **options)
            click.echo(err=as_json)
            return result

    def show(result: Generation) -> None:
        click.echo(f"{result.tokens} tokens, {result.tokens_per_s:.1f} tokens/s", err=True)

    answer(work, as_json, show)
