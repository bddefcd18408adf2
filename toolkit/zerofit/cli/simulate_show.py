"""What `zerofit simulate` prints for people."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.cli.console import out
from zerofit.models.inputs import TextInputs
from zerofit.simulate.result import SimulatedRun, Simulation
from zerofit.spec.units import shown_bytes

WIDTH = 140  # where there is no terminal
FEW = 8  # collectives to print


def show(result: Simulation) -> None:
    """Print phases, the peak and what it is made of, and the verdict; the knobs come when they are known."""
    console = out(WIDTH)
    layout = " x ".join(f"{k} {v}" for k, v in asdict(result.layout).items() if k != "zero_stage" and v > 1) or "dp 1"
    rank = f", rank {result.rank} of {result.world_size} ({layout}, ZeRO {result.layout.zero_stage})"
    console.print(Text.assemble("\n", (result.run.model, "bold"), f"{rank} on {result.device}"))
    console.print(_run(result.run))
    console.print(_phases(result))
    at = result.peak_at
    where = f"{at.line}" + (f" in {at.module}" if at.module else "")
    peak = (f"peak {shown_bytes(result.peak_bytes)}", "bold")
    console.print(Text.assemble("\n", peak, f" in {_phase_name(result)}: {where}"))
    console.print(_breakdown(result))
    _beside(console, result)
    for stage in result.stages:
        console.print(f"  rank {stage.rank}: peak {shown_bytes(stage.peak_bytes)} in {stage.peak_phase}")
    colour = {"fits": "green", "does not fit": "red"}.get(result.verdict, "yellow")
    console.print(Text.assemble("\n", (result.verdict.upper(), f"bold {colour}"), f" {result.because}"))
    if result.comm:
        console.print(_sent(result))
    if result.layers_simulated:
        check, *counts = result.layers_simulated
        console.print(
            f"extended from {' and '.join(map(str, counts))} layers; at {check} layers the highest moment is off the "
            f"line by {abs(result.extension_error):.3%} (--exact simulates all)"
        )
    if result.picture:
        console.print(f"picture: {result.picture}")


def show_knobs(result: Simulation) -> None:
    """Print what each change that was simulated would bring."""
    if result.tried:
        out(WIDTH).print(_knobs(result))


def _run(run: SimulatedRun) -> str:
    """Return what was simulated, in the words of the flags."""
    words = [str(run.precision), f"micro batch {run.micro_batch}"]
    words.append(f"accumulation {run.gradient_accumulation_steps}")
    given = run.input
    words.append(
        f"{run.seq_len} tokens" if isinstance(given, TextInputs) else f"{given.channels}x{given.size}x{given.size}"
    )
    words.append(f"{run.optimizer}" if run.optimizer else "the JSON's optimizer")
    words += ["activation checkpointing"] if run.activation_checkpointing else []
    words += [f"loss in chunks of {run.loss_chunk}"] if run.loss_chunk else []
    return ", ".join(words)


def _phase_name(row: Simulation) -> str:
    return row.peak_phase + (f" of step {row.peak_step + 1}" if row.peak_step >= 0 else "")


def _phases(result: Simulation) -> Table:
    table = Table("phase", *(f"{word}" for word in ("at start", "peak", "at end")), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.phases:
        name = row.name + (f" (step {row.step + 1})" if row.step >= 0 else "")
        table.add_row(name, *(shown_bytes(getattr(row, f"{key}_bytes")) for key in ("start", "peak", "end")))
    return table


def _breakdown(result: Simulation) -> Table:
    table = Table("alive at the peak", "", "", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
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


def _knobs(result: Simulation) -> Table:
    table = Table("change", "peak", "saves", "", box=None, pad_edge=False, title="knobs, each simulated")
    table.columns[1].justify = table.columns[2].justify = "right"
    table.title_justify = "left"
    for row in result.tried:
        saved = result.peak_bytes - row.peak_bytes
        fits = Text("fits", "green") if row.fits else "does not fit"
        table.add_row(row.change, shown_bytes(row.peak_bytes), shown_bytes(saved), fits)
    return table


def _sent(result: Simulation) -> Table:
    table = Table("collective, a step", "ranks", "in", "calls", "bytes", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in sorted(result.comm, key=lambda r: -r.bytes)[:FEW]:
        table.add_row(row.op, str(row.group_size), row.phase, str(row.count), shown_bytes(row.bytes))
    return table
