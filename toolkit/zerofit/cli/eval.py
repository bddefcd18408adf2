"""`zerofit eval`: how good a trained model is, on GPUs, the CPU or from the disk, wherever it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer, fail
from zerofit.cli.console import EventConsole
from zerofit.cli.options import AS_JSON, TRUST_MODEL_CODE, run_options
from zerofit.spec.events import Reporter
from zerofit.spec.precision import PRECISIONS

FINDING = 1
MICRO_BATCH = 8
DATA_FIELDS = (
    *("data", "data_root", "download", "text_field", "tokenizer", "image_size", "skip_bad", "seed"),
    *("micro_batch", "seq_len", "eval_samples"),
)


def placement_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where weights may go."""
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
    run(lambda: _evaluate(ckpt, options), as_json, _show)


def run(work: Callable[[], dict[str, Any]], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Answer with the work's result, or with exit code 1 where the model does not fit."""
    from zerofit.infer.fit import DoesNotFit

    try:
        answer(work, as_json, show)
    except DoesNotFit as finding:
        fail([finding.problem], FINDING, as_json)


def _evaluate(ckpt: Path, options: dict[str, Any]) -> dict[str, Any]:
    say("looking at the model and the data ...")  # importing torch alone takes seconds
    from zerofit.cli.progress import StatusLine
    from zerofit.data import split_name
    from zerofit.infer.eval_data import open_asked_data, scratch_folder
    from zerofit.infer.evaluate import evaluate, working_bytes
    from zerofit.infer.figures import figures_of
    from zerofit.infer.limits import read_limits
    from zerofit.infer.saved_model import find_folder
    from zerofit.infer.session import InferenceSession, open_model
    from zerofit.spec.errors import Problems
    from zerofit.spec.load import load_run

    problems, progress = Problems(), Reporter(EventConsole())
    flags = {name: options[name] for name in DATA_FIELDS if options[name] is not None}
    problems.attempt(lambda: load_run(None, flags))
    if "data" in flags:
        problems.attempt(lambda: split_name(flags["data"]))
    limits = problems.attempt(lambda: read_limits(options["max_memory"]))
    with StatusLine():
        folder = problems.attempt(lambda: find_folder(ckpt, progress))
    problems.raise_if_any()
    with scratch_folder(options["offload_folder"]) as scratch:
        with StatusLine():
            saved, dtype = open_model(folder, options["dtype"], scratch, progress, options["trust_model_code"])
        data = open_asked_data(saved, flags, progress)
        micro = flags.get("micro_batch", MICRO_BATCH)
        session = InferenceSession(saved=saved, dtype=dtype, limits=limits, scratch=scratch, progress=progress, say=say)
        figures = figures_of(saved, session.empty, dtype)
        working = working_bytes(session.empty, figures, data.inputs, micro, session.main, str(ckpt))
        if not working:
            say("note: what this model takes beside its weights cannot be known before it runs")
        model, placement = session.load(working, "a smaller --micro-batch, a shorter --seq-len,")
        device = placement.execution_device
        result = evaluate(model, figures, data, micro, flags.get("eval_samples"), device, progress)
        return {"model": str(ckpt), "data": data.name, **result, **session.facts(placement)}


def say(line: str) -> None:
    """A line for people, out of the way of what scripts read."""
    click.echo(line, err=True)


def _show(result: dict[str, Any]) -> None:
    from zerofit.spec.units import shown_bytes

    click.echo(f"\n{result['model']} on {result['data']}: {result['samples']:,} samples")
    for name in ("loss", "perplexity", "accuracy", "top5_accuracy"):
        if result[name] is not None:
            click.echo(f"  {name.replace('_', ' '):<15}{result[name]:.4f}")
    speed = f"{result['samples_per_s']:,.1f} samples/s"
    if result["tokens_per_s"] is not None:
        speed += f", {result['tokens_per_s']:,.0f} tokens/s"
    click.echo(f"  {'speed':<15}{speed}")
    on_top = result["peak_host_bytes"] - result["host_bytes_before"]
    host = f"{shown_bytes(result['peak_host_bytes'])}, {shown_bytes(on_top)} of it for the model"
    click.echo(f"  {'host memory':<15}{host}")
    if result["peak_device_bytes"] is not None:
        click.echo(f"  {'GPU memory':<15}{shown_bytes(result['peak_device_bytes'])}")
