"""The answers of `zerofit ckpt`, as JSON and for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from zerofit.spec.units import shown_bytes

WIDTH = 140  # where there is no terminal
FEW = 12  # tensors to print


def summary(path: Path, step: int, manifest: Any, damage: list[Any]) -> dict[str, Any]:
    """One checkpoint of a list."""
    known: dict[str, Any] = dict.fromkeys(("samples", "created", "bytes", "world_size", "layout"))
    if manifest is not None:
        known = {name: getattr(manifest, name) for name in ("samples", "created", "world_size")}
        known |= {"bytes": manifest.total_bytes, "layout": manifest.job["layout"]}
    problems = [vars(d) for d in damage]
    return {"step": step, "path": str(path), **known, "whole": not damage, "problems": problems}


def description(path: Path, manifest: Any) -> dict[str, Any]:
    """What one checkpoint is of."""
    run, facts = manifest.job["run"], manifest.job["facts"]
    return {
        **summary(path, manifest.step, manifest, []),
        "model": run["model"],
        "model_args": run["model_args"],
        "parameters": facts["parameters"],
        "task": facts["task"],
        "data": run["data"],
        "precision": run["precision"],
        "optimizer": run["optimizer"],
        "batch": manifest.job["batch"],
        "steps": manifest.job["steps"],
        "figures": manifest.figures,
        "versions": manifest.versions,
        "files": {name: mark.bytes for name, mark in manifest.files.items()},
    }


def difference_json(a: Path, b: Path, found: Any) -> dict[str, Any]:
    """All that differs; tensors that are equal are only counted."""
    apart = sorted((row for row in found.rows if row.apart), key=lambda row: -row.max_abs)
    return {
        "a": str(a),
        "b": str(b),
        "equal": found.equal,
        "compared": len(found.rows),
        "identical": len(found.rows) - len(apart),
        "max_abs": _finite(max((row.max_abs for row in apart), default=0.0)),
        "max_rel": _finite(max((row.max_rel for row in apart), default=0.0)),
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "shapes": [{"name": name, "a": list(one), "b": list(other)} for name, one, other in found.shapes],
        "tensors": [{**vars(row), "max_abs": _finite(row.max_abs), "max_rel": _finite(row.max_rel)} for row in apart],
    }


def show_list(result: dict[str, Any]) -> None:
    """A table, one checkpoint a line."""
    table = Table("step", "samples", "saved", "size", "ranks", "layout", "")
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    good = "[green]whole[/green]" if result["checked"] == "checksums" else "[green]files are there[/green]"
    for row in result["checkpoints"]:
        verdict = good if row["whole"] else f"[red]{_wrong(row['problems'])}[/red]"
        if row["samples"] is None:
            table.add_row(str(row["step"]), *["?"] * 5, verdict)
            continue
        cells = (row["step"], row["samples"], row["created"], shown_bytes(row["bytes"]), row["world_size"])
        table.add_row(*map(str, cells), layout_words(row["layout"]), verdict)
    console = _console()
    console.print(f"{result['folder']}", highlight=False)
    console.print(table)
    if result["checked"] == "sizes":
        console.print("sizes were checked; --deep compares checksums", style="dim")


def show_one(result: dict[str, Any]) -> None:
    """The facts of one checkpoint."""
    console = _console()
    console.print(f"[bold]{result['path']}[/bold]", highlight=False)
    lines = {
        "step": f"{result['step']} of {result['steps']}, {result['samples']} samples seen",
        "saved": f"{result['created']}, {shown_bytes(result['bytes'])} in {len(result['files'])} files",
        "model": f"{result['model']} ({result['parameters']:,} parameters, {result['task']})",
        "data": f"{result['data']}",
        "layout": f"{layout_words(result['layout'])} on {result['world_size']} rank(s)",
        "training": f"{result['precision']}, {result['optimizer']}, {_batch(result['batch'])}",
        "figures": ", ".join(f"{k} {v:.6g}" for k, v in result["figures"].items() if isinstance(v, int | float)),
        "versions": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    }
    for name, text in lines.items():
        console.print(f"  {name:<9}{text}", highlight=False)


def show_verdict(result: dict[str, Any]) -> None:
    """Whole, or every file that is not."""
    if result["ok"]:
        click.echo(f"{result['path']}: step {result['step']}, {click.style('whole', fg='green')}")
        return
    click.echo(f"{result['path']}: step {result['step']}, {click.style('damaged', fg='red')}")
    for problem in result["problems"]:
        more = f" ({problem['message']})" if problem["message"] else ""
        click.echo(f"  {problem['file']}: {problem['kind']}{more}")


def show_converted(result: dict[str, Any]) -> None:
    """Where it is, and how it is loaded."""
    click.echo(f"{result['out']}: universal checkpoint {result['tag']}, {shown_bytes(result['bytes'])}")
    click.echo('  "checkpoint": {"load_universal": true} in the DeepSpeed JSON, then engine.load_checkpoint(folder)')


def show_export(result: dict[str, Any]) -> None:
    """Where it is, and its files."""
    click.echo(f"{result['out']}: {result['parameters']:,} parameters in {result['dtype']}")
    for name in result["files"]:
        click.echo(f"  {name}")


def show_difference(result: dict[str, Any]) -> None:
    """Names, shapes and the tensors that differ most."""
    console = _console()
    for side in ("a", "b"):
        names = result[f"only_in_{side}"]
        for name in names[:FEW]:
            console.print(f"only in {result[side]}: {name}", highlight=False)
        _rest(console, names)
    for row in result["shapes"]:
        console.print(f"{row['name']}: shape {row['a']} and {row['b']}", highlight=False)
    if result["tensors"]:
        console.print(_tensors(result["tensors"][:FEW]))
        _rest(console, result["tensors"])
    words = "equal" if result["equal"] else "different"
    colour = "green" if result["equal"] else "yellow"
    console.print(
        f"[{colour}]{words}[/{colour}]: {result['identical']} of {result['compared']} tensors are the same bit for bit"
    )


def layout_words(layout: dict[str, Any]) -> str:
    """ "ZeRO 2, dp 2 x tp 2"."""
    degrees = " x ".join(f"{name} {layout[name]}" for name in ("dp", "tp", "pp", "sp") if layout[name] > 1)
    return f"ZeRO {layout['zero_stage']}" + (f", {degrees}" if degrees else "")


def _tensors(rows: list[dict[str, Any]]) -> Table:
    table = Table("tensor", "kind", "elements that differ", "largest difference", "relative")
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        differ = f"{row['apart']:,} of {row['elements']:,}"
        table.add_row(row["name"], row["kind"], differ, _number(row["max_abs"]), _number(row["max_rel"]))
    return table


def _rest(console: Console, rows: list[Any]) -> None:
    if len(rows) > FEW:
        console.print(f"  ... and {len(rows) - FEW} more (--json lists all)", style="dim")


def _batch(batch: dict[str, Any]) -> str:
    return f"micro batch {batch['micro']} x {batch['accumulation']} accumulated"


def _wrong(problems: list[dict[str, Any]]) -> str:
    first = f"{problems[0]['file']}: {problems[0]['kind']}"
    return first if len(problems) == 1 else f"{first} and {len(problems) - 1} more"


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
