"""`zerofit ckpt`: what a run has saved, whether it is whole, and what it can be turned into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerofit.cli import ckpt_show
from zerofit.cli.answer import answer
from zerofit.cli.eval import TRUST
from zerofit.cli.progress import StatusLine
from zerofit.spec.precision import PRECISIONS

DIFFERENT, DAMAGED = 1, 2
FOLDER = click.Path(path_type=Path)
SHARD = "1GiB"
AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")


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
    answer(lambda: _watched(lambda say: _ls(path, deep, say)), as_json, ckpt_show.show_list)


@ckpt.command()
@click.argument("path", type=FOLDER)
@AS_JSON
def show(path: Path, as_json: bool) -> None:
    """Say what a checkpoint is of: step, model, layout, precision, versions, size."""
    answer(lambda: _show(path), as_json, ckpt_show.show_one)


@ckpt.command()
@click.argument("path", type=FOLDER)
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read every file of a checkpoint (of a run's newest) and compare checksums. Exit code 0: whole, 2: damaged."""
    result: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        result.update(_watched(lambda say: _verify(path, say)))
        return result

    answer(work, as_json, ckpt_show.show_verdict)
    sys.exit(0 if result["ok"] else DAMAGED)


@ckpt.command()
@click.argument("path", type=FOLDER)
@click.argument("out", type=FOLDER)
@AS_JSON
def convert(path: Path, out: Path, as_json: bool) -> None:
    """Write a checkpoint as a universal checkpoint of DeepSpeed, which its engines load on any number of ranks."""
    answer(lambda: _watched(lambda say: _convert(path, out, say)), as_json, ckpt_show.show_converted)


@ckpt.command()
@click.argument("path", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--dtype", type=click.Choice(PRECISIONS), help="of the parameters (default: the run's precision)")
@click.option("--max-shard-size", default=SHARD, help=f"largest file of a transformers model [{SHARD}]")
@TRUST
@AS_JSON
def export(
    path: Path, out: Path, dtype: str | None, max_shard_size: str, trust_model_code: bool, as_json: bool
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, other models as one safetensors file."""
    answer(
        lambda: _watched(lambda say: _export(path, out, dtype, max_shard_size, trust_model_code, say)),
        as_json,
        ckpt_show.show_export,
    )


@ckpt.command()
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@click.option("--states", is_flag=True, help="compare the optimizer's states too")
@AS_JSON
def diff(a: Path, b: Path, states: bool, as_json: bool) -> None:
    """Compare two checkpoints or exported folders tensor by tensor. Exit code 0: equal, 1: different."""
    result: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        result.update(_watched(lambda say: _diff(a, b, states, say)))
        return result

    answer(work, as_json, ckpt_show.show_difference)
    sys.exit(0 if result["equal"] else DIFFERENT)


def _watched(work: Callable[[Callable[[str], None]], dict[str, Any]]) -> dict[str, Any]:
    """The work's answer; what it says on the way stands in one line."""
    with StatusLine() as line:
        return work(line.show)


def _ls(path: Path, deep: bool, say: Callable[[str], None]) -> dict[str, Any]:
    from zerofit.checkpoint.locate import store_of
    from zerofit.checkpoint.store import Store
    from zerofit.checkpoint.verify import verify as verify_all

    store = store_of(path, "RUN") or Store(path.absolute().parent)
    rows = []
    for entry in store.entries():
        damage = entry.damage or (verify_all(entry.path, say) if deep else [])
        rows.append(ckpt_show.summary(entry.path, entry.step, entry.manifest, damage))
    return {"folder": str(store.folder), "checked": "checksums" if deep else "sizes", "checkpoints": rows}


def _show(path: Path) -> dict[str, Any]:
    from zerofit.checkpoint.locate import locate, manifest_of

    checkpoint = locate(path, on_passed_over=_passed_over)
    return ckpt_show.description(checkpoint, manifest_of(checkpoint))


def _verify(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from zerofit.checkpoint.locate import store_of
    from zerofit.checkpoint.manifest import ManifestError, read
    from zerofit.checkpoint.names import step_of
    from zerofit.checkpoint.verify import verify as verify_all

    store = store_of(path)
    checkpoint = path if store is None else store.entries()[-1].path
    damage = verify_all(checkpoint, say)
    try:
        step = read(checkpoint).step
    except ManifestError:
        step = step_of(checkpoint.absolute())
    return {"path": str(checkpoint), "step": step, "ok": not damage, "problems": [vars(d) for d in damage]}


def _convert(path: Path, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from zerofit.checkpoint.locate import locate
    from zerofit.checkpoint.staging import refuse_existing
    from zerofit.checkpoint.universal import convert as write

    refuse_existing(out)
    done = write(locate(path, progress=say, on_passed_over=_passed_over), out, say)
    return {"out": str(done.out), "tag": done.tag, "parameters": done.parameters, "bytes": done.bytes}


def _export(
    path: Path, out: Path, dtype: str | None, max_shard_size: str, trusted: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    from zerofit.spec.units import parse_bytes

    most = parse_bytes(max_shard_size, "--max-shard-size")
    say("importing torch ...")
    from zerofit.checkpoint.export import export as write
    from zerofit.checkpoint.locate import locate
    from zerofit.checkpoint.staging import refuse_existing

    refuse_existing(out)
    done = write(locate(path, progress=say, on_passed_over=_passed_over), out, dtype, most, say, trusted)
    return {"out": str(done.out), "files": done.files, "parameters": done.parameters, "dtype": done.dtype}


def _diff(a: Path, b: Path, states: bool, say: Callable[[str], None]) -> dict[str, Any]:
    say("importing torch ...")
    from zerofit.checkpoint.diff import diff as compare

    return ckpt_show.difference_json(a, b, compare(a, b, states, say))


def _passed_over(entry: Any) -> None:
    what = ", ".join(f"{d.file}: {d.kind}" for d in entry.damage[:3])
    click.echo(f"{click.style('passed over', fg='yellow')}: {entry.path.name} is damaged ({what})", err=True)
