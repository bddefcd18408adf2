"""`zerofit train`, `zerofit models` and `zerofit plot`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from zerofit.app.job.requests import read_request
from zerofit.app.training.result import TrainingResult
from zerofit.cli.answer import BAD_INPUT, answer, fail
from zerofit.cli.console import EventConsole, fitting_table, print_facts, print_next, print_verdict
from zerofit.cli.console import out as stdout
from zerofit.cli.options import ANYWAY, AS_JSON, PATH, TRUST_MODEL_CODE, given, run_options
from zerofit.launch.rendezvous import quiet_torch
from zerofit.launch.run_lock import is_held
from zerofit.launch.world import drop_settings, given_world, is_first, unused_nodes
from zerofit.models.names import model_table
from zerofit.report.run_history import FIGURES
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.run_folder import RunFolder, layout_words
from zerofit.spec.units import counted, shown_bytes, shown_score
from zerofit.watch.follow import follow

if TYPE_CHECKING:
    from zerofit.report.traces import TraceComparison

MAX_ROWS = 12  # of a comparison of traces

# `zerofit train` without arguments; takes four minutes on two CPU cores
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
@ANYWAY
@TRUST_MODEL_CODE
@AS_JSON
def train(target: str | None, as_json: bool, anyway: bool, trust_model_code: bool, **options: object) -> None:
    """Train MODEL on --data, or the run in RUN.yaml (or a run folder's run.json). Options override the file.

    With a RUN_FOLDER, or an --output with the same run, training resumes from the newest checkpoint. SIGTERM and
    SIGUSR1 save a checkpoint and stop with exit code 75. Without arguments, zerofit trains a small Llama on the
    Python standard library's source code. If runs/ has an unfinished run of this kind, zerofit resumes it.

    Under deepspeed, torchrun, srun, mpirun or accelerate launch, zerofit uses the ranks that the launcher starts.
    """
    # Settings that a launcher makes for other programs would leave most cores unused.
    drop_settings(os.environ)
    # A launcher has started this process. It becomes the guard of one rank, and rank 0's process supervises.
    if not is_first(os.environ):
        _follow()
    answer(lambda: _train(target, given(options), anyway, trust_model_code), as_json, show)


def _train(target: str | None, flags: dict[str, object], anyway: bool, trusted: bool) -> TrainingResult:
    """Start the ranks, or join those that a launcher starts, and train."""
    world = given_world(os.environ)
    earlier = ""
    if not (target or flags):
        flags, earlier = _default_job(Path("runs")) if world is None else (DEFAULT_JOB, "")
    request = read_request(target, flags, trusted)
    with EventConsole(request.run.log_every) as console:
        for note in filter(None, (earlier, "" if world else unused_nodes(os.environ))):
            console.say(note)
        console.say("checking the run, the model and the data ...")  # importing torch takes seconds
        if world:
            # torch logs every attempt to connect, in each process.
            with quiet_torch():
                from zerofit.app.training.from_launcher import lead

            return lead(request, world, on_event=console, anyway=anyway)
        from zerofit.app.training.train import train as train_here

        return train_here(request, on_event=console, handle_signals=True, anyway=anyway)


def _default_job(runs: Path) -> tuple[dict[str, object], str]:
    """Return the run for `zerofit train` without arguments, and a line about an earlier run.

    Without an earlier run in the folder `runs`, the line is "".
    """
    # A run folder stores the content of ds_config, not its name.
    own = {name: value for name, value in DEFAULT_JOB.items() if name != "ds_config"}
    # Only the newest run of this kind decides: an older unfinished one was given up.
    for path in sorted(runs.glob("*/run.json"), key=lambda file: -file.stat().st_mtime):
        folder = RunFolder(path.parent)
        try:
            run = read_json(path)
        except (Unreadable, OSError):
            continue
        if not isinstance(run, dict) or {name: run.get(name) for name in own} != own:
            continue
        if folder.result.is_file():
            return DEFAULT_JOB, f"{folder.path} has a complete run; starting a new one"
        if is_held(folder):
            return DEFAULT_JOB, f"{folder.path} has a run that is still training; starting a new one"
        if any(folder.checkpoints.glob("step-*")):
            return {**DEFAULT_JOB, "output": folder.path}, f"{folder.path} has an unfinished run; resuming it"
        return DEFAULT_JOB, f"{folder.path} has a run that stopped before its first checkpoint; starting a new one"
    return DEFAULT_JOB, ""


def _follow() -> NoReturn:
    """Join the training of the launcher's first process."""
    # Only the first process reports errors of the run.
    try:
        world = given_world(os.environ)
    except UserError as error:
        sys.exit(error.exit_code)
    assert world
    try:
        sys.exit(follow(world))
    except RunFailed as error:
        with redirect_stderr(sys.__stderr__):
            fail([error.problem], error.exit_code, as_json=False)


def show(result: TrainingResult) -> None:
    """Print the result of a run."""
    ranks = counted(result.world_size, "rank")
    click.echo(f"\nDONE  {counted(result.steps, 'step')} on {ranks}, {layout_words(result.layout)}")
    figures = {"training loss": shown_score(result.train_loss)}
    figures |= {f"validation {name}": shown_score(value) for name, value in result.eval.items()}
    if result.unigram_entropy_nats is not None:
        meaning = "the loss of predicting each token by its frequency alone"
        figures["unigram entropy"] = f"{shown_score(result.unigram_entropy_nats)}  ({meaning})"
    # On a CPU the forecast is for the memory of the full process.
    on_cpu = "reserved_bytes" not in result.against_forecast
    names = FIGURES | ({"memory_bytes": "process memory"} if on_cpu else {})
    figures |= {names[name]: _against_forecast(name, pair) for name, pair in result.against_forecast.items()}
    figures["run folder"] = _from_here(result.run_dir)
    print_facts(stdout(), figures.items(), indent=23)
    print_next(stdout(), _next_commands(result))
    if result.sample:
        click.echo("\nA sample of generated text:\n")
        click.echo("\n".join("    " + line for line in result.sample.splitlines()))


def _next_commands(result: TrainingResult) -> list[list[str]]:
    """Return the commands that a user may run next: use the model, write a report, export."""
    folder, sample = _from_here(result.run_dir), (result.sample or "").split()
    # The first word of the sample is a prompt that the tokenizer knows.
    prompt = ["--chat"] if result.conversations else ["--prompt", *sample[:1]]
    generates = sample or result.conversations
    use = ["zerofit", "generate", folder, *prompt] if generates else ["zerofit", "eval", folder]
    # Without an active environment, a copied `zerofit ...` would not be found.
    activate = [] if shutil.which("zerofit") else [["source", f"{_from_here(sys.prefix)}/bin/activate"]]
    has_adapters = Path(result.run_dir, "model", "adapter_config.json").is_file()
    exported = ["merged", "--merge"] if has_adapters else ["exported"]
    return [*activate, use, ["zerofit", "report", folder], ["zerofit", "ckpt", "export", folder, *exported]]


def _from_here(path: str) -> str:
    """Return a path within the current folder as a relative path; other paths stay unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _against_forecast(name: str, pair: Mapping[str, float | None]) -> str:
    """Return a measured figure with its unit, and its forecast."""
    measured, forecast, difference = (pair[key] for key in ("measured", "forecast", "difference"))
    assert measured is not None
    # Bytes have one unit in both figures, so that they can be compared.
    shown = (lambda value: f"{value:.3g} s") if name.endswith("_s") else partial(shown_bytes, unit_of=measured)
    if forecast is None or difference is None:
        return f"{shown(measured)}  (not forecast)"
    return f"{shown(measured)}  ({shown(forecast)} forecast, {difference:+.1%})"


@click.command()
@click.argument("words", metavar="[WORD...]", nargs=-1)
@AS_JSON
def models(words: tuple[str, ...], as_json: bool) -> None:
    """List the named models with their parameter counts.

    With WORDs, list the models with all words in their name, kind, family or hub repositories.
    """
    answer(lambda: {"models": model_table(words)}, as_json, _show_models)


def _show_models(result: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
    console, keep = stdout(), ("name", "parameters", "kind", "source")
    rows = [{**row, "parameters": f"{row['parameters']:,}"} for row in result["models"]]
    rows = [{name: str(row[name]) for name in ("name", "kind", "parameters", "source")} for row in rows]
    console.print(fitting_table(console, rows, ("parameters",), keep, "source") if rows else "no model matches")


@click.command()
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=PATH)
@click.option(
    "--trace",
    "traces",
    type=PATH,
    multiple=True,
    help="compare a forecast with a measured trace (give the option twice, without RUN)",
)
@click.option("--out", type=PATH, help="picture to write [runs.png, or trace.png for traces]")
@AS_JSON
def plot(runs: tuple[Path, ...], traces: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Plot loss, throughput and memory of run folders into one PNG, or compare a forecast step with a measured one.

    --trace FORECAST --trace MEASURED compares the time of a step by module and kind, with the largest differences
    first. `zerofit plan --trace` or `simulate --trace` writes FORECAST; `zerofit train --profile` writes MEASURED.
    """
    from zerofit.report.plot import draw
    from zerofit.report.traces import compare_traces

    if bool(runs) == bool(traces):
        hint = "zerofit plot RUN..., or --trace FORECAST --trace MEASURED"
        problem = Problem(kind="usage", message="give run folders or two traces", hint=hint, where="RUN, --trace")
        fail([problem], BAD_INPUT, as_json)
    if traces:
        answer(lambda: compare_traces(traces, out or Path("trace.png")), as_json, _show_traces)
    else:
        pictures = out or Path("runs.png")
        answer(lambda: draw(list(runs), pictures), as_json, lambda drawn: click.echo(drawn["picture"]))


def _show_traces(traces: TraceComparison) -> None:
    console, times = stdout(), traces.measured_step_s / traces.forecast_step_s
    step = f"{traces.measured_step_s:.3g} s per step, {times:.3g} times the forecast"
    print_verdict(console, "MEASURED", step)
    rows = [
        {
            "busy in a step": row.what,
            "forecast": f"{1e3 * row.forecast_s:.3f} ms",
            "measured": f"{1e3 * row.measured_s:.3f} ms",
            "difference": f"{1e3 * row.off_s:+.3f} ms",
        }
        for row in traces.rows[:MAX_ROWS]
    ]
    if rows:
        name, *figures = rows[0]
        console.print(fitting_table(console, rows, figures, tuple(rows[0]), name))
    print_facts(console, [("picture", str(traces.picture))], 9)
