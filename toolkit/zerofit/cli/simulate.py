"""`zerofit simulate`: what one rank of a run allocates, to the byte, before any GPU is there."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.app.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, make_table, out
from zerofit.cli.options import AS_JSON, PATH, clusters, given, hardware_options, run_options
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problems
from zerofit.spec.events import Event
from zerofit.spec.run import RunRequest
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.simulate.result import SimulatedRun, Simulation
    from zerofit.spec.cluster import Cluster

FINDING = 1
HARDWARE_FIELDS = ("gpus", "nodes", "host_memory", "device_memory")
RUN_FIELDS = (
    *("model_args", "loss", "data", "data_root", "tokenizer", "image_size", "steps", "micro_batch"),
    *("gradient_accumulation_steps", "global_batch", "seq_len", "optimizer", "gradient_clipping", "precision"),
    *("activation_checkpointing", "loss_chunk", "ds_config", "ranks"),
    *("tensor_parallel", "pipeline", "sequence_parallel"),
)
WIDTH = 140  # where there is no terminal
PLAIN: dict[str, Any] = {"box": None, "pad_edge": False}  # of tables
FEW = 8  # collectives to print


@click.command()
@click.argument("target", metavar="MODEL | RUN.yaml")
@hardware_options(*HARDWARE_FIELDS, kinds="h100-80gb, ..., cpu (default: this machine)")
@click.option("--rank", type=click.IntRange(min=0), help="the rank to simulate (default: one of each pipeline stage)")
@click.option("--input", "image", metavar="image:CxHxW", help="what an image model is fed, where no --data is named")
@click.option("--exact", is_flag=True, help="simulate every layer of a large model instead of extending from few")
@click.option("--knobs/--no-knobs", default=True, help="simulate what could be changed, too")
@click.option("--plot", type=PATH, help="picture of the memory over the run (implies --exact)")
@run_options(RUN_FIELDS)
@AS_JSON
def simulate(target: str, as_json: bool, **options: Any) -> None:
    """Run the real DeepSpeed engine as one rank of MODEL's training (or RUN.yaml's), without memory and without GPUs.

    Exit code 0: it fits, 1: it does not, or only within the margin, 2: bad input.
    """
    result = answer(lambda: _simulate(target, as_json, options), as_json, show_knobs)
    sys.exit(0 if result.fits else FINDING)


def _simulate(target: str, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate, and show the answer before its knobs, which take longer."""
    start = time.perf_counter()
    asked, cluster = _asked(target, options)
    with EventConsole() as console:
        console(Event(kind="status", text="checking the run and the model ..."))  # importing torch takes seconds
        from zerofit.app.simulation import simulate as run

        exact = options["exact"] or options["plot"] is not None
        result = run(asked, cluster, rank=options["rank"], image=options["image"], exact=exact, on_event=console)
    if options["plot"]:
        result.plot(options["plot"])
        result = replace(result, picture=options["plot"])
    if not as_json:
        show(result)
    if options["knobs"]:
        with EventConsole() as console:
            result.knobs(console)
    return replace(result, seconds=round(time.perf_counter() - start, 1))


def _asked(target: str, options: dict[str, Any]) -> tuple[RunRequest, Cluster]:
    """Return the run and the hardware that are named. Raises UserError with all that is wrong."""
    problems = Problems()
    flags = given({name: options[name] for name in RUN_FIELDS})
    asked = problems.attempt(lambda: read_request(target, flags))
    hardware = {name: options[name] for name in ("kinds", *HARDWARE_FIELDS)}
    if hardware["gpus"] is None and asked and asked.run.ranks:
        hardware["gpus"] = asked.run.ranks // (hardware["nodes"] or 1)
    found = problems.attempt(lambda: clusters(**hardware))
    if found and len(found) > 1:
        problems.add("usage", "--gpu names several kinds", "`zerofit plan` compares several", "--gpu")
    problems.raise_if_any()
    assert asked and found
    return asked, found[0]


def show(result: Simulation) -> None:
    """Print phases, the peak and what it is made of, and the verdict; the knobs come when they are known."""
    console = out(WIDTH)
    layout = " x ".join(f"{k} {v}" for k, v in asdict(result.layout).items() if k != "zero_stage" and v > 1) or "dp 1"
    rank = f", rank {result.rank} of {result.world_size} ({layout}, ZeRO {result.layout.zero_stage})"
    console.print(Text.assemble("\n", (result.run.model, "bold"), f"{rank} on {result.device}"))
    console.print(_run(result.run))
    console.print(_phases(result))
    phase = result.peak_phase + (f" of step {result.peak_step + 1}" if result.peak_step >= 0 else "")
    where = f"{result.peak_at.line}" + (f" in {result.peak_at.module}" if result.peak_at.module else "")
    peak = (f"peak {shown_bytes(result.peak_bytes)}", "bold")
    console.print(Text.assemble("\n", peak, f" in {phase}: {where}"))
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
    if result.picture:
        console.print(f"picture: {result.picture}")


def _run(run: SimulatedRun) -> str:
    """Return what was simulated, in the words of the flags."""
    fed, size = run.input, f"{run.seq_len} tokens"
    if not isinstance(fed, TextInputs):
        size = f"{fed.channels}x{fed.size}x{fed.size}"
    words = [str(run.precision), f"micro batch {run.micro_batch}", f"accumulation {run.gradient_accumulation_steps}"]
    words += [size, run.optimizer or "the JSON's optimizer"]
    words += ["activation checkpointing"] if run.activation_checkpointing else []
    words += [f"loss in chunks of {run.loss_chunk}"] if run.loss_chunk else []
    return ", ".join(words)


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
            f"reserved by torch's allocator {shown_bytes(result.reserved_bytes)}, shown by nvidia-smi about "
            f"{shown_bytes(result.smi_bytes)} of {shown_bytes(result.device_total_bytes)}"
        )
    host = result.host_bytes
    if sum(host.values()):
        kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in host.items() if size)
        console.print(f"host memory of this rank: {kinds}")
    if result.nvme_bytes:
        console.print(f"NVMe of this rank: {shown_bytes(result.nvme_bytes)}")


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
