"""`zerofit simulate`: what one rank of a run allocates, to the byte, before any GPU is there."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.app.releases import go_on_with
from zerofit.app.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.baseline import FAIL_ABOVE, annotate, baseline_options, read_asked_baseline
from zerofit.cli.console import EventConsole, make_table, out
from zerofit.cli.options import (
    AS_JSON,
    INPUT,
    PATH,
    TRUST_MODEL_CODE,
    clusters,
    given,
    hardware_options,
    run_options,
)
from zerofit.models.inputs import ImageInputs, NamedInputs, TableInputs
from zerofit.simulate.result import SimulatedRun, SimulatedScript
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Event, Reporter
from zerofit.spec.mesh import describe_rank
from zerofit.spec.overhead import HOST_PROCESS_BYTES
from zerofit.spec.partial_training import PART_FIELDS
from zerofit.spec.profile import Savings
from zerofit.spec.run import RunRequest
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.simulate.result import Simulation
    from zerofit.spec.cluster import Cluster

FINDING = 1
HARDWARE_FIELDS = ("gpus", "nodes", "host_memory", "device_memory")
RUN_FIELDS = (
    *("model_args", "task", "loss", "data", "data_root", "text_field", "pair_field", "label_field", "target_len"),
    *("tokenizer", "image_size", "steps", "micro_batch", "micro_batch_by_rank"),
    *("gradient_accumulation_steps", "global_batch", "seq_len", "optimizer", "gradient_clipping", "precision"),
    *("activation_checkpointing", *Savings._fields, "ds_config", "ranks"),
    *("tensor_parallel", "pipeline", "pipeline_schedule", "sequence_parallel", "expert_parallel"),
    *PART_FIELDS,
    *("pretrained", "label_smoothing", "mixup", "cutmix", "image_sizes", "sync_batch_norm", "ema"),
)
WIDTH = 140  # where there is no terminal
PLAIN: dict[str, Any] = {"box": None, "pad_edge": False}  # of tables
SCRIPT = "zerofit.script"  # words after --, in click's context
FEW = 8  # collectives to print
RELEASES = {"deepspeed": "deepspeed_version", "transformers": "transformers_version"}  # package -> option
PLACES = {name: f"--{field.replace('_', '-')}" for name, field in RELEASES.items()}
TRACE_HELP = "file for the timeline of a step: Chrome trace format, opens in Perfetto (implies --exact)"


class CommandAfterDashes(click.Command):
    """A command whose words after `--` are another program's command line (`ctx.meta[SCRIPT]`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Cut the words after the first `--` off; None where there is none."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[SCRIPT] = args[cut + 1 :] if cut < len(args) else None
        return super().parse_args(ctx, args[:cut])


@click.command(cls=CommandAfterDashes)
@click.argument("target", metavar="MODEL | RUN.yaml | -- COMMAND", required=False)
@hardware_options(
    *HARDWARE_FIELDS, kinds="h100-80gb, p5.48xlarge, ..., cpu, or a YAML file of your own (default: this machine)"
)
@click.option("--rank", type=click.IntRange(min=0), help="the rank to simulate (default: the one that needs most)")
@INPUT
@click.option("--exact", is_flag=True, help="simulate every layer of a large model instead of extending from few")
@click.option("--alloc-conf", default="", metavar="OPTIONS", help="of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF")
@click.option("--knobs/--no-knobs", default=True, help="simulate what could be changed, too")
@click.option("--longest", is_flag=True, help="of a script (--): simulate the longest batches that it allows, too")
@click.option("--deepspeed-version", metavar="X.Y.Z", help="simulate with this release, installed beside the others")
@click.option("--transformers-version", metavar="X.Y.Z", help="the same of transformers")
@click.option("--plot", type=PATH, help="picture of the memory over the run (implies --exact)")
@click.option("--trace", type=PATH, help=TRACE_HELP)
@baseline_options
@run_options(RUN_FIELDS)
@TRUST_MODEL_CODE
@AS_JSON
@click.pass_context
def simulate(ctx: click.Context, target: str | None, as_json: bool, **options: Any) -> None:
    """Run the real DeepSpeed engine as one rank of MODEL's training (or RUN.yaml's), without memory and without GPUs.

    Or any training script, unmodified: write what starts it behind --, with python, torchrun, deepspeed or accelerate
    launch, as in `zerofit simulate --gpus 8 --gpu h100-80gb -- torchrun train.py --epochs 3`. It is stopped after
    --steps optimizer steps (2). Of the options, the hardware's, --rank, --steps, --alloc-conf, --plot and --trace
    belong to it.

    Exit code 0: it fits, 1: it does not, or only within the margin, or more is added than --fail-above, 2: bad input.
    """
    words = ctx.meta[SCRIPT]

    def work() -> Simulation:
        releases = {name: options[field] for name, field in RELEASES.items() if options[field]}
        with EventConsole() as console:
            go_on_with(releases, PLACES, Reporter(console), own=words is None)
        options["base"] = read_asked_baseline(options)
        try:
            if words is not None:
                return _script(ctx, words, as_json, options)
            return _simulate(_named(target, options["longest"]), as_json, options)
        except (RuntimeError, ImportError, AttributeError) as error:
            if not releases:
                raise
            raise UserError(_unknown_release(releases, error)) from error

    result = answer(work, as_json, show_knobs)
    annotate(result)
    sys.exit(FINDING if not result.fits or (result.against and result.against.exceeded) else 0)


def _unknown_release(releases: dict[str, str], error: Exception) -> Problem:
    """Return that zerofit's simulator does not work with releases that were asked for."""
    named = " and ".join(f"{name} {version}" for name, version in releases.items())
    said = str(error).strip().splitlines()[-1]
    hint = "take a later release: which ones were tried stands in docs/scripts.md, under releases"
    where = " ".join(PLACES[name] for name in releases)
    return Problem(kind="release", message=f"zerofit cannot simulate with {named}: {said}", hint=hint, where=where)


def _named(target: str | None, longest: bool) -> str:
    """Return the model or run file. Raises UserError where none is named, or it is asked what only scripts have."""
    if longest:
        hint = "--seq-len is the length of a run's batches"
        raise UserError(Problem(kind="usage", message="--longest is of a script", hint=hint, where="--longest"))
    if target is None:
        hint = "zerofit simulate MODEL, RUN.yaml, or -- and the command that starts your own script"
        raise UserError(Problem(kind="usage", message="nothing to simulate is named", hint=hint, where="MODEL"))
    return target


def _script(ctx: click.Context, words: list[str], as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate a user's own script, and show the answer. Raises UserError with all that is wrong."""
    problems = Problems()
    _refuse_run_options(ctx, problems)
    hardware = {name: options[name] for name in ("kinds", *HARDWARE_FIELDS)}
    with EventConsole() as console:
        console(Event(kind="status", text="reading the command ..."))  # some launchers' parsers import torch
        from zerofit.app.script_simulation import STEPS, simulate_script
        from zerofit.simulate.script.command import read_command

        read = problems.attempt(lambda: read_command(words))
        if read and hardware["gpus"] is None:
            hardware["gpus"] = read.gpus
        if read and hardware["nodes"] is None:
            hardware["nodes"] = read.nodes
        found = problems.attempt(lambda: one_cluster(hardware))
        problems.raise_if_any()
        settings = {name: options[name] for name in ("rank", "steps", "longest", "alloc_conf", "trace")}
        settings |= {"steps": options["steps"] or STEPS}
        result = simulate_script(words, found, **settings, on_event=console)
    return _with_knobs(_shown(result, as_json, options), options)


def _refuse_run_options(ctx: click.Context, problems: Problems) -> None:
    """Refuse options that describe a run of zerofit's own: a script's are words of its command."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        described = name in (*RUN_FIELDS, "target", "image", "exact", "trust_model_code") and name != "steps"
        if described and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            message = f"{parameter.opts[-1]} describes a run of zerofit's own, and behind -- stands a command"
            problems.add("usage", message, "leave it out, and change the command instead", parameter.opts[-1])


def _simulate(target: str, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate, and show the answer before its knobs, which take longer."""
    start = time.perf_counter()
    asked, cluster = _asked(target, options)
    with EventConsole() as console:
        console(Event(kind="status", text="checking the run and the model ..."))  # importing torch takes seconds
        from zerofit.app.simulation import simulate as run

        exact = options["exact"] or options["plot"] is not None
        settings = {name: options[name] for name in ("rank", "image", "alloc_conf", "trace")}
        result = run(asked, cluster, **settings, exact=exact, on_event=console)
    result = _with_knobs(_shown(result, as_json, options), options)
    return replace(result, seconds=round(time.perf_counter() - start, 1))


def _with_knobs(result: Simulation, options: dict[str, Any]) -> Simulation:
    """Simulate what could be changed, if that is asked for."""
    if options["knobs"]:
        with EventConsole() as console:
            result.knobs(console)
    return result


def _shown(result: Simulation, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Draw and show what was found; return it with its picture and what it is compared with."""
    if options["base"] is not None:
        from zerofit.simulate.baseline import compare_with

        allowed = FAIL_ABOVE if options["fail_above"] is None else options["fail_above"]
        result = replace(result, against=compare_with(options["base"], result, options["baseline"], allowed))
    if options["plot"]:
        result.plot(options["plot"])
        result = replace(result, picture=options["plot"])
    if not as_json:
        show(result)
    return result


def _asked(target: str, options: dict[str, Any]) -> tuple[RunRequest, Cluster]:
    """Return the run and the hardware that are named. Raises UserError with all that is wrong."""
    problems = Problems()
    flags = given({name: options[name] for name in RUN_FIELDS})
    asked = problems.attempt(lambda: read_request(target, flags, options["trust_model_code"]))
    hardware = {name: options[name] for name in ("kinds", *HARDWARE_FIELDS)}
    if hardware["gpus"] is None and asked and asked.run.ranks:
        hardware["gpus"] = asked.run.ranks // (hardware["nodes"] or 1)
    found = problems.attempt(lambda: one_cluster(hardware))
    problems.raise_if_any()
    assert asked and found
    return asked, found


def one_cluster(hardware: dict[str, Any]) -> Cluster:
    """Return the hardware that the options name. Raises UserError where they name several kinds."""
    found = clusters(**hardware)
    if len(found) > 1:
        hint = "`zerofit plan` compares several"
        raise UserError(Problem(kind="usage", message="--gpu names several kinds", hint=hint, where="--gpu"))
    return found[0]


def show(result: Simulation) -> None:
    """Print phases, the peak and what it is made of, and the verdict; the knobs come when they are known."""
    console = out(WIDTH)
    layout = " x ".join(f"{k} {v}" for k, v in asdict(result.layout).items() if k != "zero_stage" and v > 1) or "dp 1"
    place = f": {describe_rank(result.rank, result.layout)}" if result.layout.combined else ""
    rank = f", rank {result.rank} of {result.world_size} ({layout}, ZeRO {result.layout.zero_stage}){place}"
    console.print(Text.assemble("\n", (result.run.model, "bold"), f"{rank} on {result.device}"))
    console.print(_run(result.run) if isinstance(result.run, SimulatedRun) else _seen(result.run))
    console.print(_phases(result))
    phase = result.peak_phase + (f" of step {result.peak_step + 1}" if result.peak_step >= 0 else "")
    where = f"{result.peak_at.line}" + (f" in {result.peak_at.module}" if result.peak_at.module else "")
    peak = (f"peak {shown_bytes(result.peak_bytes)}", "bold")
    console.print(Text.assemble("\n", peak, f" in {phase}: {where}"))
    if result.peak_at.own and not result.peak_at.line.endswith(result.peak_at.own):
        console.print(f"  your line: {result.peak_at.own}")
    console.print(_breakdown(result))
    _beside(console, result)
    for stage in result.stages:
        console.print(f"  rank {stage.rank}: peak {shown_bytes(stage.peak_bytes)} in {stage.peak_phase}")
    colour = {"fits": "green", "does not fit": "red"}.get(result.verdict, "yellow")
    console.print(Text.assemble("\n", (result.verdict.upper(), f"bold {colour}"), f" {result.because}"))
    if result.comm:
        table = make_table("collective, a step", "ranks", "in", "calls", "bytes", right=(3, 4), **PLAIN)
        for row in sorted(result.comm, key=lambda r: -r.bytes)[:FEW]:
            table.add_row(row.op, str(row.group_size), row.phase, str(row.count), shown_bytes(row.bytes))
        console.print(table)
    if result.layers_simulated:
        check, *counts = result.layers_simulated
        console.print(
            f"extended from {' and '.join(map(str, counts))} layers; at {check} layers the highest moment is off the "
            f"line by {abs(result.extension_error):.3%} (--exact simulates all)"
        )
    if isinstance(result.run, SimulatedScript):
        _longest(console, result.run)
        _notes(console, result.run)
    if result.picture:
        console.print(f"picture: {result.picture}")
    if result.trace:
        console.print(f"trace of a step of this rank: {result.trace} (opens in https://ui.perfetto.dev)")
    if result.against:
        colour = "red" if result.against.exceeded else "green"
        console.print(Text(f"\n{result.against.because} ({result.against.baseline})", colour))


def _run(run: SimulatedRun) -> str:
    """Return what was simulated, in the words of the flags."""
    fed, size = run.input, f"{run.seq_len} tokens"
    if isinstance(fed, ImageInputs):
        size = f"{fed.channels}x{fed.size}x{fed.size}"
    if isinstance(fed, TableInputs):
        size = f"{fed.features} features"
    if isinstance(fed, NamedInputs):
        size = ", ".join(f"{one.name} {'x'.join(map(str, one.shape)) or 1}" for one in fed.tensors)
    words = [str(run.precision), f"micro batch {run.micro_batch}", f"accumulation {run.gradient_accumulation_steps}"]
    words += [size, run.optimizer or "the JSON's optimizer"]
    words += ["activation checkpointing"] if run.activation_checkpointing else []
    words[-1] += " kept on the host" if run.activation_offload else ""
    words += [f"loss in chunks of {run.loss_chunk}"] if run.loss_chunk else []
    words += [f"MLPs in tiles of {run.mlp_chunk}"] if run.mlp_chunk else []
    return ", ".join(words)


def _seen(run: SimulatedScript) -> str:
    """Return what was seen of a script."""
    seen = run.facts
    words = [f"{seen.model} of {seen.parameters:,} parameters"]
    if seen.trained_parameters < seen.parameters:
        words.append(f"{seen.trained_parameters:,} of them trained")
    words += [seen.precision, f"micro batch {seen.micro_batch}", f"accumulation {seen.accumulation}", seen.optimizer]
    words += ["activation checkpointing"] if seen.checkpointing else []
    words += [f"batches of up to {seen.longest_seen} tokens"] if seen.longest_seen else []
    if seen.longest_allowed > seen.longest_seen:
        words[-1] += f" ({seen.allowed_by} allows {seen.longest_allowed})"
    return ", ".join(words)


def _longest(console: Console, run: SimulatedScript) -> None:
    """Print what batches of the longest sequences would need."""
    found = run.longest
    if found:
        fits = "fits" if found.fits else "does not fit"
        peak, phase = shown_bytes(found.peak_bytes), found.peak_phase
        console.print(f"with batches of {found.tokens} tokens: peak {peak} in {phase}, {fits}")


def _notes(console: Console, run: SimulatedScript) -> None:
    """Print how the script ended, and what stood in for what."""
    figures = "figures are an upper bound" if run.is_upper_bound else "figures are exact"
    console.print(f"{run.facts.name} {run.facts.ended}; {figures}")
    for note in run.facts.notes:
        console.print(f"  note: {note.text}" + (f" ({note.count} times)" if note.count > 1 else ""), markup=False)


def _phases(result: Simulation) -> Table:
    table = make_table("phase", "at start", "peak", "at end", right=(1, 2, 3), **PLAIN)
    for row in result.phases:
        name = row.name + (f" (step {row.step + 1})" if row.step >= 0 else "")
        table.add_row(name, *(shown_bytes(getattr(row, f"{key}_bytes")) for key in ("start", "peak", "end")))
    return table


def _breakdown(result: Simulation) -> Table:
    table = make_table("alive at the peak", "", "", right=(1, 2), **PLAIN)
    for kind, size in result.breakdown.items():
        if size:
            table.add_row(f"  {kind}", shown_bytes(size), f"{size / result.peak_bytes:.1%}")
    return table


def _beside(console: Console, result: Simulation) -> None:
    if result.device != "cpu":
        console.print(
            f"reserved by torch's allocator {shown_bytes(result.reserved_bytes)}{_ahead(result)}, shown by nvidia-smi "
            f"about {shown_bytes(result.smi_bytes)} of {shown_bytes(result.device_total_bytes)}"
        )
    host = result.host_bytes
    if sum(host.values()):
        kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in host.items() if size)
        kept = f" ({shown_bytes(result.host_kept_bytes)} of it kept for reuse)" if result.host_kept_bytes else ""
        console.print(f"host memory of this rank: {kinds}{kept}; its process about {shown_bytes(HOST_PROCESS_BYTES)}")
    if result.nvme_bytes:
        console.print(f"NVMe of this rank: {shown_bytes(result.nvme_bytes)}")


def _ahead(result: Simulation) -> str:
    if result.reserved_ahead_bytes == result.reserved_bytes:
        return ""
    return f" (up to {shown_bytes(result.reserved_ahead_bytes)} where the host is ahead of the device)"


def show_knobs(result: Simulation) -> None:
    """Print what each change that was simulated would bring."""
    look = {"title": "knobs, each simulated", "title_justify": "left"}
    table = make_table("change", "peak", "saves", "", right=(1, 2), **PLAIN, **look)
    for row in result.tried:
        saved = result.peak_bytes - row.peak_bytes
        fits = Text("fits", "green") if row.fits else "does not fit"
        table.add_row(row.change, shown_bytes(row.peak_bytes), shown_bytes(saved), fits)
    if result.tried:
        out(WIDTH).print(table)
