"""`zerofit train`: a model learns on data, through the DeepSpeed engine, on all local devices."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.options import run_options
from zerofit.spec.events import Reporter
from zerofit.spec.run_folder import RunFolder

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


LAYOUT = {"ranks", "tensor_parallel", "pipeline", "sequence_parallel", "micro_batch"}


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


def _train(target: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    return start(asked_run(target, flags))


def asked_run(target: str | None, flags: dict[str, Any]) -> Any:
    """The run (`zerofit.spec.load.Asked`) that a model, a run file or a run folder and flags ask for."""
    from zerofit.spec.load import load_run

    if target is None and not flags:
        flags = dict(DEFAULT_JOB)
    if target and RunFolder(Path(target)).plan.is_file():
        flags = {"output": Path(target), **_free_batch(flags), **flags}
        target = str(RunFolder(Path(target)).run)
    file = Path(target) if target and is_run_file(target) else None
    if target and file is None:
        flags = {"model": target, **flags}
    return load_run(file, flags)


def _free_batch(flags: dict[str, Any]) -> dict[str, None]:
    """What of a run folder's batch sizes is chosen anew where the flags change the layout: not the global batch."""
    if not LAYOUT & set(flags):
        return {}
    return {"micro_batch": None, "gradient_accumulation_steps": None}


def is_run_file(target: str) -> bool:
    """A YAML file, or a JSON file that is no transformers config."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return "model_type" not in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return True  # the loader says what is wrong with it


def start(asked: Any) -> dict[str, Any]:
    """Prepare, start the ranks, watch them; the result for `--json`. Raises UserError, RunFailed and Stopped."""
    click.echo("checking the run, the model and the data ...", err=True)  # importing torch alone takes seconds
    from zerofit.app.prepare_folder import finished_before, make_ready, prepare
    from zerofit.launch.run_lock import held

    prepared = prepare(asked, Reporter(EventConsole()))
    job, folder, machine = prepared.job, prepared.folder, prepared.machine
    finished = finished_before(job, folder)
    if finished:
        click.echo(f"note: all {job.steps} steps of this run are done; a larger --steps goes on with it", err=True)
        return {"run_dir": str(folder.path), **finished}
    with held(folder, lambda text: click.echo(text, err=True)):
        for note in make_ready(folder, job.start):
            click.echo(f"note: {note}", err=True)
        return {"run_dir": str(folder.path), **_run(job, folder, machine)}


def _run(job: Any, folder: RunFolder, machine: Any) -> dict[str, Any]:
    """Start the ranks of a job that is ready, and watch them to their end; their result."""
    from zerofit.app.supervision import run_once
    from zerofit.cli.view import RunView
    from zerofit.launch.local import local_site
    from zerofit.launch.ops import build_ops, needed_ops
    from zerofit.watch.watch import Watch

    with RunView(folder, job.run.log_every) as view, closing(Watch("127.0.0.1")) as watch:
        site = local_site(job, machine)
        build_ops(needed_ops(job.ds_config, machine), site.env(""), view.phase)
        return run_once(folder, site, watch, view)


def show(result: dict[str, Any]) -> None:
    """Print what a training has come to."""
    layout = " x ".join(f"{k} {v}" for k, v in result["layout"].items() if v > 1 or k == "zero_stage")
    click.echo(f"\n{result['steps']} steps on {result['world_size']} rank(s) ({layout.replace('_', ' ')})")
    click.echo(f"  training loss    {result['train_loss']:.4f}")
    for name, value in result["eval"].items():
        click.echo(f"  validation {name:<11}".ljust(19) + f"{value:.4f}")
    if result["unigram_entropy_nats"] is not None:
        entropy = result["unigram_entropy_nats"]
        click.echo(
            f"  unigram entropy  {entropy:.4f}  (the loss of a model that only knows how often each token occurs)"
        )
    if result.get("sample"):
        click.echo("\nA sample of what it writes:\n")
        click.echo("\n".join("    " + line for line in result["sample"].splitlines()))
    click.echo(f"\nrun folder: {result['run_dir']}")
