"""`zerofit ckpt`: what a run has saved, whether it is whole, and what it can be turned into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli import ckpt_show
from zerofit.cli.answer import R, answer
from zerofit.cli.console import EventConsole
from zerofit.cli.options import AS_JSON, TRUST_MODEL_CODE
from zerofit.spec.events import OnEvent
from zerofit.spec.precision import PRECISIONS

if TYPE_CHECKING:
    from zerofit.app.checkpoints import Checkpoint

DIFFERENT, DAMAGED = 1, 2
FOLDER = click.Path(path_type=Path)
SHARD = "1GiB"


@click.group()
def ckpt() -> None:
    """List, check, compare, convert and export checkpoints.

    PATH is a run's folder, which stands for its newest whole checkpoint, or a checkpoint's (checkpoints/step-...).
    """


@ckpt.command()
@click.argument("path", metavar="RUN|FOLDER", type=FOLDER)
@click.option("--deep", is_flag=True, help="read every file and compare checksums, not only sizes")
@AS_JSON
def ls(path: Path, deep: bool, as_json: bool) -> None:
    """List the checkpoints of a run, damaged ones too."""
    _answer(path, lambda it, on_event: it.list(path, deep=deep, on_event=on_event), as_json, ckpt_show.show_list)


@ckpt.command()
@click.argument("path", type=FOLDER)
@AS_JSON
def show(path: Path, as_json: bool) -> None:
    """Say what a checkpoint is of: step, model, layout, precision, versions, size."""
    _answer(path, lambda it, on_event: it.describe(on_event=on_event), as_json, ckpt_show.show_description)


@ckpt.command()
@click.argument("path", type=FOLDER)
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read every file of a checkpoint (of a run's newest) and compare checksums. Exit code 0: whole, 2: damaged."""
    result = _answer(path, lambda it, on_event: it.verify(on_event=on_event), as_json, ckpt_show.show_verdict)
    sys.exit(0 if result.ok else DAMAGED)


@ckpt.command()
@click.argument("path", type=FOLDER)
@click.argument("out", type=FOLDER)
@AS_JSON
def convert(path: Path, out: Path, as_json: bool) -> None:
    """Write a checkpoint as a universal checkpoint of DeepSpeed, which its engines load on any number of ranks."""
    _answer(path, lambda it, on_event: it.convert(out, on_event=on_event), as_json, ckpt_show.show_converted)


@ckpt.command()
@click.argument("path", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--dtype", type=click.Choice(PRECISIONS), help="of the parameters (default: the run's precision)")
@click.option("--max-shard-size", default=SHARD, help=f"largest file of a transformers model [{SHARD}]")
@TRUST_MODEL_CODE
@AS_JSON
def export(path: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, other models as one safetensors file."""
    _answer(path, lambda it, on_event: it.export(out, on_event=on_event, **options), as_json, ckpt_show.show_export)


@ckpt.command()
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@click.option("--states", is_flag=True, help="compare the optimizer's states too")
@AS_JSON
def diff(a: Path, b: Path, states: bool, as_json: bool) -> None:
    """Compare two checkpoints or exported folders tensor by tensor. Exit code 0: equal, 1: different."""
    result = _answer(
        a, lambda it, on_event: it.diff(b, states=states, on_event=on_event), as_json, ckpt_show.show_difference
    )
    sys.exit(0 if result.equal else DIFFERENT)


def _answer(path: Path, work: Callable[[Checkpoint, OnEvent], R], as_json: bool, show: Callable[[R], None]) -> R:
    """Answer with what the work makes of the checkpoint at `path`."""

    def watched() -> R:
        from zerofit.app.checkpoints import Checkpoint

        with EventConsole() as console:
            return work(Checkpoint(path), console)

    return answer(watched, as_json, show)
