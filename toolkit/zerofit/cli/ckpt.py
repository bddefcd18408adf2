"""`zerofit ckpt`: what a run has saved, whether it is complete, and what it can be turned into."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from zerofit.cli.answer import R
from zerofit.cli.console import EventConsole, answer_watched, fitting_table, out, print_facts
from zerofit.cli.options import AS_JSON, PATH, TRUST_MODEL_CODE
from zerofit.cli.terminal import style
from zerofit.spec.events import OnEvent
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.checkpoints import (
        Checkpoint,
        CheckpointDescription,
        CheckpointList,
        VerifyResult,
    )
    from zerofit.checkpoint.diff import CheckpointDiff
    from zerofit.checkpoint.export import ExportResult
    from zerofit.checkpoint.universal import ConvertResult
    from zerofit.spec.run_folder import Layout

DIFFERENT, DAMAGED = 1, 2
SHARD = "1GiB"
FEW = 12  # tensors to print


@click.group()
def ckpt() -> None:
    """List, check, compare, convert and export checkpoints.

    PATH is a run's folder, which stands for its newest whole checkpoint, or a checkpoint's (checkpoints/step-...).
    """


@ckpt.command()
@click.argument("path", metavar="RUN|FOLDER", type=PATH)
@click.option("--deep", is_flag=True, help="read every file and compare checksums, not only sizes")
@AS_JSON
def ls(path: Path, deep: bool, as_json: bool) -> None:
    """List the checkpoints of a run, damaged ones too."""
    _answer(path, lambda it, on_event: it.list(path, deep=deep, on_event=on_event), as_json, show_list)


@ckpt.command()
@click.argument("path", type=PATH)
@AS_JSON
def show(path: Path, as_json: bool) -> None:
    """Say what a checkpoint is of: step, model, layout, precision, versions, size."""
    _answer(path, lambda it, on_event: it.describe(on_event=on_event), as_json, show_description)


@ckpt.command()
@click.argument("path", type=PATH)
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read every file of a checkpoint (of a run's newest) and compare checksums. Exit code 0: complete, 2: damaged."""
    result = _answer(path, lambda it, on_event: it.verify(on_event=on_event), as_json, show_verdict)
    sys.exit(0 if result.ok else DAMAGED)


@ckpt.command()
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@AS_JSON
def convert(path: Path, out: Path, as_json: bool) -> None:
    """Write a checkpoint as a universal checkpoint of DeepSpeed, which its engines load on any number of ranks."""
    _answer(path, lambda it, on_event: it.convert(out, on_event=on_event), as_json, show_converted)


@ckpt.command()
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@click.option("--dtype", type=click.Choice(PRECISIONS), help="of the parameters (default: the run's precision)")
@click.option("--max-shard-size", default=SHARD, help=f"largest file of a transformers model [{SHARD}]")
@click.option("--merge", is_flag=True, help="write the whole model with the adapters of --lora merged into it")
@TRUST_MODEL_CODE
@AS_JSON
def export(path: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, other models as one safetensors file.

    Adapters (--lora) become a folder for peft. With --merge PATH may also be such a folder.
    """
    _answer(path, lambda it, on_event: it.export(out, on_event=on_event, **options), as_json, show_export)


@ckpt.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--states", is_flag=True, help="compare the optimizer's states too")
@AS_JSON
def diff(a: Path, b: Path, states: bool, as_json: bool) -> None:
    """Compare two checkpoints or exported folders tensor by tensor. Exit code 0: equal, 1: different."""
    result = _answer(a, lambda it, on_event: it.diff(b, states=states, on_event=on_event), as_json, show_difference)
    sys.exit(0 if result.equal else DIFFERENT)


def _answer(path: Path, work: Callable[[Checkpoint, OnEvent], R], as_json: bool, show: Callable[[R], None]) -> R:
    """Answer with what the work makes of the checkpoint at `path`."""

    def checked(console: EventConsole) -> R:
        from zerofit.app.checkpoints import Checkpoint

        return work(Checkpoint(path), console)

    return answer_watched(checked, as_json, show)


def show_list(result: CheckpointList) -> None:
    """Print a table, one checkpoint a line."""
    rows, styles = [], []
    for row in result.checkpoints:
        wrong = [f"{problem.file}: {problem.kind}" for problem in row.problems]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        known = row.layout is not None
        rows.append(
            {
                "step": str(row.step),
                "state": "complete" if row.whole else f"damaged: {wrong[0]}{more}",
                "saved": str(row.created) if known else "?",
                "size": shown_bytes(row.bytes or 0) if known else "?",
                "ranks": str(row.world_size) if known else "?",
                "layout": _layout(row.layout) if row.layout else "?",
                "samples": str(row.samples) if known else "?",
            }
        )
        styles.append(None if row.whole else "red")
    console = out()
    console.print(str(result.folder), soft_wrap=True)
    if rows:
        keep = ("step", "state", "saved", "size", "layout", "ranks", "samples")
        console.print(fitting_table(console, rows, ("step", "size", "ranks", "samples"), keep, "state", styles))
    if result.checked == "sizes":
        console.print("checked: names and sizes of all files; --deep compares checksums", style="dim")


def show_description(result: CheckpointDescription) -> None:
    """Print the facts of one checkpoint."""
    console = out()
    console.print(str(result.path), style="bold", soft_wrap=True)
    layout = _layout(result.layout) if result.layout else "?"
    lines = {
        "step": f"{result.step} of {result.steps}, {result.samples} samples seen",
        "saved": f"{result.created}, {shown_bytes(result.bytes or 0)} in {len(result.files)} files",
        "model": f"{result.model} ({result.parameters:,} parameters, {result.task})",
        "data": f"{result.data}",
        "layout": f"{layout}, world size {result.world_size}",
        "training": f"{result.precision}, {result.optimizer}, "
        f"micro batch {result.batch.micro} x {result.batch.accumulation} accumulated",
        "figures": ", ".join(f"{k} {v:.6g}" for k, v in result.figures.items() if isinstance(v, int | float)),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    print_facts(console, lines.items(), indent=11)


def show_verdict(result: VerifyResult) -> None:
    """Print that the checkpoint is complete, or every file that is not."""
    verdict = style("complete", fg="green") if result.ok else style("damaged", fg="red")
    click.echo(f"{result.path}: step {result.step}, {verdict}")
    for problem in result.problems:
        more = f" ({problem.message})" if problem.message else ""
        click.echo(f"  {problem.file}: {problem.kind}{more}")


def show_converted(result: ConvertResult) -> None:
    """Print where it is, and how it is loaded."""
    click.echo(f"{result.out}: universal checkpoint {result.tag}, {shown_bytes(result.bytes)}")
    click.echo('  "checkpoint": {"load_universal": true} in the DeepSpeed JSON, then engine.load_checkpoint(folder)')


def show_export(result: ExportResult) -> None:
    """Print where it is, and its files."""
    click.echo(f"{result.out}: {result.parameters:,} parameters in {result.dtype}")
    for name in result.files:
        click.echo(f"  {name}")


def show_difference(result: CheckpointDiff) -> None:
    """Print names, shapes and the tensors that differ most."""
    console = out()
    for side, names in ((result.a, result.only_in_a), (result.b, result.only_in_b)):
        for name in names[:FEW]:
            console.print(f"only in {side}: {name}")
        _rest(console, names)
    for name, one, other in result.shapes:
        console.print(f"{name}: shape {list(one)} and {list(other)}")
    apart = result.apart
    if apart:
        rows = [
            {
                "tensor": row.name,
                "kind": row.kind,
                "differ": f"{row.apart:,} of {row.elements:,}",
                "by at most": _number(row.max_abs),
                "relative": _number(row.max_rel),
            }
            for row in apart[:FEW]
        ]
        keep = ("tensor", "differ", "by at most", "relative", "kind")
        console.print(fitting_table(console, rows, keep[1:4], keep, "tensor"))
        _rest(console, apart)
    verdict = Text("equal", style="green") if result.equal else Text("different", style="yellow")
    same, compared = len(result.rows) - len(apart), len(result.rows)
    console.print(verdict.append(f": {same} of {compared} tensors are the same bit for bit", style="default"))


def _layout(layout: Layout) -> str:
    """Return a layout as "ZeRO 2, dp 2 x tp 2"."""
    degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "sp": layout.sp}
    shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return f"ZeRO {layout.zero_stage}" + (f", {shown}" if shown else "")


def _rest(console: Console, rows: Sequence[object]) -> None:
    if len(rows) > FEW:
        console.print(f"  ... and {len(rows) - FEW} more (--json lists all)", style="dim")


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
