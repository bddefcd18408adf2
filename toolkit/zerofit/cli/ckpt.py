"""`zerofit ckpt`: list, verify, compare, convert and export checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from zerofit.cli.answer import R
from zerofit.cli.console import (
    EventConsole,
    answer_watched,
    fitting_table,
    out,
    print_facts,
    print_verdict,
)
from zerofit.cli.options import AS_JSON, PATH, TRUST_MODEL_CODE, Group
from zerofit.spec.events import OnEvent
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.units import counted, first_names, shown_bytes

if TYPE_CHECKING:
    from zerofit.app.checkpoints import Checkpoint, CheckpointDescription, CheckpointList, VerifyResult
    from zerofit.checkpoint.conversion import ConvertResult
    from zerofit.checkpoint.diff import CheckpointDiff
    from zerofit.checkpoint.export import ExportResult

# exit codes, as of cmp: 1 for a difference, 2 for a checkpoint that cannot be used
DIFFERENT, DAMAGED = 1, 2


def _trust(context: click.Context, _: click.Parameter, trusted: bool) -> None:
    if trusted:
        from zerofit.checkpoint.safe_load import trusted_pickles

        # click leaves this context at the end of the command.
        context.with_resource(trusted_pickles(True))


TRUST_PICKLE = click.option(
    "--trust-pickle",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="also load files with classes that are unusual in checkpoints; their code may run",
)
REPAIR = click.option(
    "--repair",
    is_flag=True,
    help="replace a lost rank's data: weights from the 16-bit weights in the checkpoint, zeros for the optimizer",
)
MODEL = click.option("--model", type=PATH, help="folder with config.json, for another program's checkpoint without one")
SHARD = "1GiB"
MAX_TENSORS = 12  # that `diff` lists
LOADING = {
    "universal": (
        "universal checkpoint",
        'set "checkpoint": {"load_universal": true} in the DeepSpeed JSON, then engine.load_checkpoint(folder)',
    ),
    "deepspeed": ("DeepSpeed checkpoint", "engine.load_checkpoint(folder) with the same parameter groups"),
    "dcp": ("distributed checkpoint", "torch.distributed.checkpoint.load with the keys model and optimizer"),
    "hf": ("weights", 'model.load_state_dict(safetensors.torch.load_file("model.safetensors"))'),
}
LOADING_HF = {  # by a file in the folder
    "config.json": "from_pretrained(folder)",
    "adapter_config.json": "peft.PeftModel.from_pretrained(model, folder)",
}
FORMATS = tuple(LOADING)


@click.group(cls=Group)
def ckpt() -> None:
    """List, check, compare, convert and export checkpoints.

    PATH is a checkpoint's folder (checkpoints/step-...), or a run's folder: then its newest complete checkpoint is
    used. PATH can also be a checkpoint of DeepSpeed, HF Trainer, Accelerate, Lightning, PyTorch DCP or FSDP, or a
    state dict.
    """


@ckpt.command()
@click.argument("path", metavar="RUN|FOLDER", type=PATH)
@click.option("--deep", is_flag=True, help="read every file and compare checksums, not only sizes")
@TRUST_PICKLE
@AS_JSON
def ls(path: Path, deep: bool, as_json: bool) -> None:
    """List the checkpoints of a run, including damaged checkpoints."""
    _answer(path, lambda saved, on_event: saved.list(path, deep=deep, on_event=on_event), as_json, show_list)


@ckpt.command()
@click.argument("path", type=PATH)
@TRUST_PICKLE
@AS_JSON
def show(path: Path, as_json: bool) -> None:
    """Print the step, model, layout, precision, versions and size of a checkpoint."""
    _answer(path, lambda saved, on_event: saved.describe(on_event=on_event), as_json, show_description)


@ckpt.command()
@click.argument("path", type=PATH)
@TRUST_PICKLE
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read every file of a checkpoint and compare checksums. Exit code 0: complete, 2: damaged."""
    result = _answer(path, lambda saved, on_event: saved.verify(on_event=on_event), as_json, show_verdict)
    sys.exit(0 if result.ok else DAMAGED)


@ckpt.command()
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@click.option("--to", type=click.Choice(FORMATS), default="universal", help="format to write [universal]")
@click.option("--ranks", type=int, help="data parallel ranks that load it (--to deepspeed)")
@click.option("--stage", type=int, help="ZeRO stage that loads it (--to deepspeed)")
@click.option(
    "--dtype", type=click.Choice(PRECISIONS), help="type of the weights (--to deepspeed or hf) [as in training]"
)
@REPAIR
@MODEL
@TRUST_PICKLE
@AS_JSON
def convert(path: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Write a checkpoint with optimizer states for another program, or for other ranks and another ZeRO stage.

    --to universal: DeepSpeed loads the result on any number of ranks, with load_universal.

    --to deepspeed: DeepSpeed loads the result on --ranks at --stage, without further settings.

    --to dcp: FSDP2 and other programs that use torch.distributed.checkpoint load the result.

    --to hf: the result has only the weights, in the form that `ckpt export` writes.

    If --to is deepspeed or universal, the same command continues with the next file after an interruption.
    """
    _answer(path, lambda saved, on_event: saved.convert(out, on_event=on_event, **options), as_json, show_converted)


@ckpt.command()
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@click.option("--dtype", type=click.Choice(PRECISIONS), help="type of the parameters [the run's precision]")
@click.option(
    "--max-shard-size", default=SHARD, help=f"maximum size of one weights file of a transformers model [{SHARD}]"
)
@click.option("--merge", is_flag=True, help="merge the adapters of --lora into the model")
@REPAIR
@MODEL
@TRUST_MODEL_CODE
@TRUST_PICKLE
@AS_JSON
def export(path: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    A model that is not from transformers becomes one safetensors file.

    Adapters (--lora) are written as a peft folder. With --merge, PATH may also be a peft folder.
    """
    _answer(path, lambda saved, on_event: saved.export(out, on_event=on_event, **options), as_json, show_export)


@ckpt.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--states", is_flag=True, help="compare the optimizer's states too")
@TRUST_PICKLE
@AS_JSON
def diff(a: Path, b: Path, states: bool, as_json: bool) -> None:
    """Compare two checkpoints or exported folders tensor by tensor. Exit code 0: equal, 1: different."""
    result = _answer(
        a, lambda saved, on_event: saved.diff(b, states=states, on_event=on_event), as_json, show_difference
    )
    sys.exit(0 if result.equal else DIFFERENT)


def _answer(path: Path, work: Callable[[Checkpoint, OnEvent], R], as_json: bool, show: Callable[[R], None]) -> R:
    """Call `work` with the checkpoint at `path`, show its events, and print its answer."""

    def checked(console: EventConsole) -> R:
        from zerofit.app.checkpoints import Checkpoint

        return work(Checkpoint(path), console)

    return answer_watched(checked, as_json, show)


def show_list(result: CheckpointList) -> None:
    """Print whether all checkpoints are complete, and a table with one checkpoint per line."""
    rows, styles = [], []
    for row in result.checkpoints:
        wrong = [f"{problem.file}: {problem.kind}" for problem in row.problems]
        # A damaged checkpoint may not have the file with these facts.
        known = row.created is not None
        rows.append(
            {
                "step": str(row.step),
                "state": "complete" if row.whole else f"damaged: {first_names(wrong, 1)}",
                "saved": _moment(row.created) if known else "?",
                "size": shown_bytes(row.bytes or 0) if known else "?",
                "ranks": str(row.world_size) if row.world_size else "?",
                "layout": str(row.layout or "?"),
                "samples": f"{row.samples:,}" if row.samples is not None else "?",
                "program": row.program,
            }
        )
        # A resume skips damaged checkpoints, so they are highlighted.
        styles.append(None if row.whole else "red")
    console, damaged = out(), len([style for style in styles if style])
    count = counted(len(rows), "checkpoint")
    words = f"{damaged} of {count} in" if damaged else f"{count} in"
    verdict = "DAMAGED" if damaged else "COMPLETE" if rows else "NONE"
    print_verdict(console, verdict, f"{words} {result.folder}", good=not damaged)
    if rows:
        keep = ("step", "state", "saved", "size", "layout", "ranks", "samples")
        # The program is in a column only if the list has checkpoints of other programs.
        if any(row["program"] != "zerofit" for row in rows):
            keep = ("step", "program", *keep[1:])
        console.print(fitting_table(console, rows, ("step", "size", "ranks", "samples"), keep, "state", styles))
    if result.checked == "sizes":
        print_facts(console, [("checked", "names and sizes of all files; --deep compares checksums")], 9)


def show_description(result: CheckpointDescription) -> None:
    """Print the facts of one checkpoint."""
    console, batch = out(), result.batch
    # Another program's checkpoint has a name, but neither task, data, batch nor steps.
    of = f" of {result.steps}" if result.steps else ""
    console.print(f"STEP {result.step}{of}  {result.path}", style="bold", soft_wrap=True)
    task = f", {result.task}" if result.task else ""
    losses = {name: value for name, value in result.figures.items() if name == "loss" or name.startswith("valid")}
    micro = f"micro batch {batch.micro} x {batch.accumulation} accumulation steps" if batch else ""
    lines = {
        "what": result.name,
        "saved": f"{_moment(result.created)}, {shown_bytes(result.bytes or 0)} in {counted(len(result.files), 'file')}",
        "model": f"{result.model or 'without config.json'} ({result.parameters:,} parameters{task})",
        "data": f"{result.data}, {result.samples:,} samples seen" if result.data else "",
        "layout": f"{result.layout}, {counted(result.world_size, 'rank')}" if batch and result.world_size else "",
        "training": ", ".join(filter(None, (result.precision, result.optimizer, micro))),
        "figures": ", ".join(f"{k} {v:.4g}" for k, v in losses.items() if isinstance(v, int | float)),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    print_facts(console, [(name, text) for name, text in lines.items() if text], indent=11)


def show_verdict(result: VerifyResult) -> None:
    """Print that the checkpoint is complete, or list each damaged file."""
    console = out()
    verdict = "COMPLETE" if result.ok else "DAMAGED"
    print_verdict(console, verdict, f"step {result.step}, {result.path}", good=result.ok)
    for problem in result.problems:
        details = f" ({problem.message})" if problem.message else ""
        print_facts(console, [("", f"{problem.file}: {problem.kind}{details}")], indent=2, hang=2)


def show_converted(result: ConvertResult) -> None:
    """Print the path of the converted checkpoint, and how to load it."""
    console = out()
    what, call = LOADING[result.format]
    if result.format == "hf":
        call = next((how for file, how in LOADING_HF.items() if (result.out / file).is_file()), call)
    print_verdict(console, "WRITTEN", f"{result.out}, {what} {result.tag}".rstrip() + f", {shown_bytes(result.bytes)}")
    print_facts(console, [("to load", call)], indent=9)


def show_export(result: ExportResult) -> None:
    """Print the path of the exported model, and its files."""
    console = out()
    print_verdict(console, "WRITTEN", f"{result.out}, {result.parameters:,} parameters in {result.dtype}")
    print_facts(console, [("files", ", ".join(result.files))], indent=9)


def show_difference(result: CheckpointDiff) -> None:
    """Print whether both checkpoints are equal, and which names, shapes and tensors differ."""
    console, apart = out(), result.apart
    equal, compared = len(result.rows) - len(apart), len(result.rows)
    words = f"{equal} of {compared} tensors are the same bit for bit"
    print_verdict(console, "EQUAL" if result.equal else "DIFFERENT", words, good=result.equal)
    for side, names in ((result.a, result.only_in_a), (result.b, result.only_in_b)):
        for name in names[:MAX_TENSORS]:
            console.print(f"only in {side}: {name}", soft_wrap=True)
        _rest(console, names)
    for name, a, b in result.shapes:
        console.print(f"{name}: shape {list(a)} and {list(b)}", soft_wrap=True)
    if apart:
        rows = [
            {
                "tensor": row.name,
                "kind": row.kind,
                "differ": f"{row.apart:,} of {row.elements:,}",
                "by at most": _number(row.max_abs),
                "relative": _number(row.max_rel),
            }
            for row in apart[:MAX_TENSORS]
        ]
        keep = ("tensor", "differ", "by at most", "relative", "kind")
        console.print(fitting_table(console, rows, keep[1:4], keep, "tensor"))
        _rest(console, apart)


def _moment(created: object) -> str:
    """Return an ISO time without seconds and "T": "2026-11-28 01:09"."""
    return str(created)[:16].replace("T", " ")


def _rest(console: Console, rows: Sequence[object]) -> None:
    if len(rows) > MAX_TENSORS:
        console.print(f"  ... and {len(rows) - MAX_TENSORS} more (--json lists all)", style="dim")


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
