"""`zerofit simulate`: forecast the memory of one rank of a run, to the byte, without a GPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zerofit.app.job.requests import read_request
from zerofit.app.simulation.other_releases import rerun_with
from zerofit.cli.answer import answer
from zerofit.cli.check_show import workflow_command
from zerofit.cli.console import EventConsole
from zerofit.cli.options import (
    AS_JSON,
    INPUT,
    PATH,
    TRUST_MODEL_CODE,
    clusters,
    given,
    hardware_options,
    only_cluster,
    run_options,
)
from zerofit.cli.report import ENDINGS, write_page
from zerofit.cli.simulate_show import show, show_knobs
from zerofit.config.ds_json import write_for_trainer
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.files import refuse_target, write_text
from zerofit.spec.run import RunRequest, fields_of

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation
    from zerofit.spec.cluster import Cluster

FINDING = 1
HARDWARE_FIELDS = ("gpus", "nodes", "host_memory", "device_memory")
RUN_FIELDS = fields_of("simulate")
SCRIPT = "zerofit.script"  # key in click's context for the words after --
RELEASES = {"deepspeed": "deepspeed_version", "transformers": "transformers_version"}  # package -> option
RELEASE_FLAGS = {name: f"--{field.replace('_', '-')}" for name, field in RELEASES.items()}
FAIL_ABOVE = 0.01
FAIL_HELP = "exit with 1 if the peak grows by more than this, or the run no longer fits [1%]"
SNAPSHOT_HELP = "write a memory snapshot in torch's format, for memory_viz and `zerofit explain` (implies --exact)"
DETAILS_HELP = "also print memory by phase and kind, collectives and all changes; with --json also the memory over time"
HTML_HELP = "write the answer as a page, with the memory over time (implies --exact)"
TRACE_HELP = "write the timeline of a step, in Chrome trace format for Perfetto (implies --exact)"


class CommandAfterDashes(click.Command):
    """A command that accepts another program's command line after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the arguments after the first `--` into `ctx.meta[SCRIPT]` (None without `--`)."""
        # click would remove the dashes and read the script's own options.
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[SCRIPT] = args[cut + 1 :] if cut < len(args) else None
        return super().parse_args(ctx, args[:cut])


def _percentage(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return 0.01 for "1%". Raises BadParameter if the value is not a percentage."""
    if value is None:
        return None
    try:
        share = float(value.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise click.BadParameter(f"{value!r} is not a percentage such as 1%")
    return share


@click.command(cls=CommandAfterDashes)
@click.argument("target", metavar="MODEL | RUN.yaml | -- COMMAND", required=False)
@hardware_options(*HARDWARE_FIELDS, kinds="h100-80gb, p5.48xlarge, ..., cpu, or your own YAML file [this machine]")
@click.option("--rank", type=click.IntRange(min=0), help="rank to simulate [the rank that needs most memory]")
@INPUT
@click.option("--exact", is_flag=True, help="simulate all layers of a large model instead of extrapolating from a few")
@click.option("--alloc-conf", default="", metavar="OPTIONS", help="as in PYTORCH_CUDA_ALLOC_CONF")
@click.option("--knobs/--no-knobs", default=True, help="also simulate changes that may help")
@click.option("--details", is_flag=True, help=DETAILS_HELP)
@click.option("--longest", is_flag=True, help="with a script: also simulate the longest batches that the script allows")
@click.option("--deepspeed-version", metavar="X.Y.Z", help="use this release of DeepSpeed, installed separately")
@click.option("--transformers-version", metavar="X.Y.Z", help="use this release of transformers, installed separately")
@click.option(
    "--write-config",
    type=PATH,
    help="write the configuration file (DeepSpeed, Accelerate or FSDP) of the first change that fits",
)
@click.option("--plot", type=PATH, help="write a picture of the memory over time (implies --exact)")
@click.option("--html", type=PATH, metavar="FILE", help=HTML_HELP)
@click.option("--trace", type=PATH, help=TRACE_HELP)
@click.option("--snapshot", type=PATH, help=SNAPSHOT_HELP)
@click.option("--baseline", type=PATH, help="print how much memory was added since this earlier output of --json")
@click.option("--fail-above", callback=_percentage, metavar="PERCENT", help=FAIL_HELP)
@run_options(RUN_FIELDS)
@TRUST_MODEL_CODE
@AS_JSON
@click.pass_context
def simulate(ctx: click.Context, target: str | None, as_json: bool, **options: Any) -> None:
    """Forecast the memory of one rank that trains MODEL (or RUN.yaml), with DeepSpeed's real engine on fake
    tensors.

    To simulate your own unmodified script, put its command (python, torchrun, deepspeed or accelerate launch) after
    --, as in `zerofit simulate --gpus 8 --gpu h100-80gb -- torchrun train.py --epochs 3`. The script is stopped
    after --steps optimizer steps (default 2). Hardware options, --rank, --steps, --alloc-conf, --plot, --trace and
    --snapshot apply.

    Exit code 0: it fits; 1: it does not fit, is close to the limit, or adds more than --fail-above; 2: bad input.
    """
    # `work` shows the verdict before the changes are simulated. This takes minutes, and many users need only the
    # verdict. So `answer` shows only the changes.
    words = ctx.meta[SCRIPT]

    def work() -> Simulation:
        releases = {name: options[field] for name, field in RELEASES.items() if options[field]}
        with EventConsole() as console:
            # With other releases, this process is replaced by one that imports them.
            rerun_with(releases, RELEASE_FLAGS, Reporter(console), own=words is None)
        options["base"] = _read_baseline(options)
        refuse_target(options["html"], "--html", ENDINGS)
        if options["write_config"]:
            _refuse_config_file(options["write_config"], options["knobs"])
        try:
            if words is not None:
                result = _simulate_script(ctx, words, as_json, options)
            else:
                result = _simulate_run(_named(target, options["longest"]), as_json, options)
        # An older or newer release may lack what the simulator needs. Without these options it is a bug of zerofit.
        except (RuntimeError, ImportError, AttributeError) as error:
            if not releases:
                raise
            raise UserError(_release_problem(releases, error)) from error
        # The page draws the memory over time. In --json it is most of the text, so it is only there with --details.
        write_page(replace(result, with_timeline=True).to_dict(), options["html"])
        return replace(result, with_timeline=options["details"])

    result = answer(work, as_json, lambda result: show_knobs(result, options["details"]))
    _annotate(result)
    if options["write_config"]:
        _write_config(result, options["write_config"])
    sys.exit(FINDING if not result.fits or (result.against and result.against.exceeded) else 0)


def _read_baseline(options: dict[str, Any]) -> dict[str, object] | None:
    """Return the simulation to compare with; None without --baseline. Raises UserError."""
    if options["baseline"] is None:
        if options["fail_above"] is not None:
            hint = "pass the output of --json from before the change"
            message = "--fail-above needs --baseline"
            raise UserError(Problem(kind="usage", message=message, hint=hint, where="--fail-above"))
        return None
    from zerofit.simulate.forecast.result import read_baseline

    return read_baseline(options["baseline"])


def _refuse_config_file(path: Path, knobs: bool) -> None:
    """Raise UserError if --write-config cannot work because of its path or of --no-knobs."""
    problems = Problems()
    if path.exists():
        problems.add("exists", f"{path} exists", "name a new file", "--write-config")
    problems.attempt(lambda: refuse_target(path, "--write-config"))
    if not knobs:
        message = "--write-config needs the changes that --no-knobs leaves out"
        problems.add("usage", message, "leave out one of these options", "--write-config")
    problems.raise_if_any()


def _write_config(result: Simulation, path: Path) -> None:
    """Write the configuration file of the change that fits and costs the least speed."""
    fitting = [row for row in result.tried if row.fits and (row.config or row.file)]
    # A DeepSpeed JSON comes before a file of Accelerate or FSDP.
    best = min(fitting, key=lambda row: (row.config is None, row.cost_rank), default=None)
    if best is None:
        click.echo("note: no file was written, because there is no change that both fits and needs a file", err=True)
        return
    if best.config:
        write_for_trainer(best.config, path)
    else:
        import yaml

        as_yaml = path.suffix in (".yaml", ".yml")
        write_text(path, yaml.safe_dump(best.file) if as_yaml else json.dumps(best.file, indent=2) + "\n")
    # A script's change names a file that does not exist. The user has chosen its name.
    change = re.sub(r"[\w-]+\.(json|yaml)\b", lambda _: str(path), best.change)
    click.echo(f"wrote {path}, {'the DeepSpeed JSON' if best.config else 'the file'} of {change}", err=True)


def _release_problem(releases: dict[str, str], error: Exception) -> Problem:
    """Return the problem to report if the simulator fails with the requested releases."""
    named = " and ".join(f"{name} {version}" for name, version in releases.items())
    reason = str(error).strip().splitlines()[-1]
    hint = "use a later release; docs/scripts.md lists the tested releases"
    where = " ".join(RELEASE_FLAGS[name] for name in releases)
    return Problem(kind="release", message=f"zerofit cannot simulate with {named}: {reason}", hint=hint, where=where)


def _named(target: str | None, longest: bool) -> str:
    """Return `target`, a model or run file.

    Raises UserError if it is missing, or if --longest is given, which is only for scripts.
    """
    if longest:
        hint = "use --seq-len for a run"
        raise UserError(Problem(kind="usage", message="--longest is only for scripts", hint=hint, where="--longest"))
    if target is None:
        hint = "give MODEL, RUN.yaml, or -- and the command of your script"
        raise UserError(Problem(kind="usage", message="nothing to simulate", hint=hint, where="MODEL"))
    return target


def _simulate_script(ctx: click.Context, words: list[str], as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate a user's script, and show the answer. Raises UserError with all problems."""
    problems = Problems()
    # The script itself sets what the options of a run would set, except the number of steps.
    for parameter in ctx.command.params:
        name, flag = parameter.name or "", parameter.opts[-1]
        of_run = name in (*RUN_FIELDS, "target", "image", "exact", "trust_model_code") and name != "steps"
        if of_run and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            message = f"{flag} does not apply to the script after --"
            problems.add("usage", message, "leave it out, and change the script's command instead", flag)
    hardware = {name: options[name] for name in ("kinds", *HARDWARE_FIELDS)}
    with EventConsole() as console:
        console(Event(kind="status", text="reading the command ..."))  # some launchers' parsers import torch
        from zerofit.app.simulation.scripts import STEPS, simulate_script

        cluster = problems.attempt(lambda: command_cluster(words, hardware))
        problems.raise_if_any()
        assert cluster
        settings = {name: options[name] for name in ("rank", "steps", "longest", "alloc_conf", "trace", "snapshot")}
        settings |= {"steps": options["steps"] or STEPS}
        result = simulate_script(words, cluster, **settings, on_event=console)
    return _show_and_try_changes(result, as_json, options)


def command_cluster(words: list[str], hardware: dict[str, Any]) -> Cluster:
    """Return the hardware from the options, by default with the command's GPUs and nodes.

    Raises UserError with all problems.
    """
    from zerofit.simulate.script.command import read_command

    problems = Problems()
    command = problems.attempt(lambda: read_command(words))
    named = {name: getattr(command, name) for name in ("gpus", "nodes") if command and hardware[name] is None}
    cluster = problems.attempt(lambda: only_cluster(clusters(**hardware | named)))
    problems.raise_if_any()
    assert cluster
    return cluster


def _simulate_run(target: str, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate a run, and show the answer. Raises UserError with all problems."""
    start = time.perf_counter()
    request, cluster = _read_run(target, options)
    with EventConsole() as console:
        console(Event(kind="status", text="checking the run and the model ..."))  # importing torch takes seconds
        from zerofit.app.simulation.runs import simulate as run

        # A picture of the memory over time shows all layers.
        exact = options["exact"] or options["plot"] is not None or options["html"] is not None
        settings = {name: options[name] for name in ("rank", "image", "alloc_conf", "trace", "snapshot")}
        result = run(request, cluster, **settings, exact=exact, on_event=console)
    result = _show_and_try_changes(result, as_json, options)
    return replace(result, seconds=round(time.perf_counter() - start, 1))


def _show_and_try_changes(result: Simulation, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Compare the result with --baseline's file, show it, and simulate changes."""
    if options["base"] is not None:
        from zerofit.simulate.forecast.result import compare_with

        allowed = FAIL_ABOVE if options["fail_above"] is None else options["fail_above"]
        result = replace(result, against=compare_with(options["base"], result, options["baseline"], allowed))
    if options["plot"]:
        result.plot(options["plot"])
        result = replace(result, picture=options["plot"])
    # The forecast is shown before the changes, because each change is a simulation of its own.
    if not as_json:
        show(result, options["details"])
    if options["knobs"]:
        with EventConsole() as console:
            result.knobs(console)
    return result


def _read_run(target: str, options: dict[str, Any]) -> tuple[RunRequest, Cluster]:
    """Return the run and the hardware. Raises UserError with all problems."""
    problems = Problems()
    flags = given({name: options[name] for name in RUN_FIELDS})
    request = problems.attempt(lambda: read_request(target, flags, options["trust_model_code"]))
    hardware = {name: options[name] for name in ("kinds", *HARDWARE_FIELDS)}
    # --ranks are divided among the nodes if --gpus does not say how many a node has.
    if hardware["gpus"] is None and request and request.run.ranks:
        ranks, nodes = request.run.ranks, hardware["nodes"] or 1
        hardware["gpus"] = max(1, ranks // max(1, nodes))
        if nodes > 0 and ranks % nodes:
            message = f"{ranks} ranks cannot be divided among {nodes} nodes"
            problems.add("bad-value", message, "change --nodes or --ranks, or set --gpus", "--nodes, --ranks")
    cluster = problems.attempt(lambda: only_cluster(clusters(**hardware)))
    problems.raise_if_any()
    assert request and cluster
    return request, cluster


def _annotate(result: Simulation) -> None:
    """On GitHub, annotate the line of the peak with the memory that a change adds."""
    compared = result.against
    if compared is None or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    kind = "error" if compared.exceeded else "notice"
    properties = {"title": "zerofit simulate"}
    file, _, line = result.peak_at.own.rpartition(":")
    root = Path(os.environ.get("GITHUB_WORKSPACE", ".")).resolve()
    # GitHub shows an annotation at a line only if the path is below the repository.
    if file and Path(file).resolve().is_relative_to(root):
        properties = {"file": str(Path(file).resolve().relative_to(root)), "line": line, **properties}
    click.echo(workflow_command(kind, compared.because, **properties), err=True)
