"""`zerofit check` and `zerofit schema`: a DeepSpeed JSON judged, mended, explained, resolved."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.options import run_options
from zerofit.spec.hardware import find_device, supports
from zerofit.spec.precision import PRECISIONS

RUN_FIELDS = (
    *("model_args", "steps", "micro_batch", "gradient_accumulation_steps", "global_batch", "seq_len", "optimizer"),
    *("lr", "schedule", "warmup_steps", "min_lr", "weight_decay", "momentum", "gradient_clipping", "precision"),
    *("ranks", "tensor_parallel", "pipeline", "sequence_parallel"),
)
STEPS = 1000  # of the run that --resolve assumes where none are given: only schedulers need them
CLEAN, WARNINGS, ERRORS = 0, 1, 2


@click.command()
@click.argument("file")
@click.option("--model", help="check sizes against this model, and fill them in with --resolve")
@click.option("--gpu", metavar="KIND", help="the device that it is for: h100-80gb, a100-40gb, ..., cpu")
@run_options(RUN_FIELDS)
@click.option("--strict", is_flag=True, help="exit with 1 where there are only warnings")
@click.option("--fix", is_flag=True, help="write the mended file beside the old one and show the difference")
@click.option(
    "--migrate", is_flag=True, help="carry an old file to the installed DeepSpeed, written beside the old one"
)
@click.option("--explain", is_flag=True, help="which keys take effect, which are ignored, and the defaults that matter")
@click.option("--resolve", is_flag=True, help='print the plain DeepSpeed JSON that a run gets, every "auto" filled')
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def check(file: str, as_json: bool, strict: bool, **options: Any) -> None:
    """Find everything that is wrong in a DeepSpeed JSON, before anything starts.

    FILE is a path or the name of a bundled file. Exit code 0: clean, 1: warnings under --strict, 2: errors.
    """
    given = {name: value for name, value in options.items() if value is not None}
    result: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        result.update(_check(file, given))
        return {key: value for key, value in result.items() if not key.startswith("_")}

    answer(work, as_json, lambda _: _show(result, given))
    severities = {p["severity"] for p in result["problems"]}
    sys.exit(ERRORS if "error" in severities else WARNINGS if strict and severities else CLEAN)


@click.command()
def schema() -> None:
    """Print a JSON Schema of the installed DeepSpeed's configuration, for completion and help in an editor."""
    from zerofit.check.schema import schema as make

    print(json.dumps(make(), indent=2))


def _check(file: str, given: dict[str, Any]) -> dict[str, Any]:
    from zerofit.check.check import check as find
    from zerofit.check.check import mend
    from zerofit.check.explain import explain
    from zerofit.check.migrate import migrate
    from zerofit.config.ds_json import find_config, read_document
    from zerofit.spec.load import load_run

    load_run(None, {k: v for k, v in given.items() if k in RUN_FIELDS})  # refuses --ranks 0 and the like
    path = find_config(file, where="FILE")
    document = read_document(path, where="FILE")
    setting = _setting(given)
    findings = find(document, setting)
    result: dict[str, Any] = {"file": str(path), "problems": [f.as_dict() for f in findings], "_text": document.text}
    if given["explain"]:
        result["explained"] = [row.as_dict() for row in explain(document, findings, setting)]
    if given["migrate"]:
        migrated = migrate(document, setting)
        result |= {"lost": migrated.lost, "kept": migrated.kept, "_new": migrated.text}
        result["written"] = _write_beside(path, "migrated", document.text, migrated.text)
    elif given["fix"]:
        result["_new"] = mend(document, setting)
        result["written"] = _write_beside(path, "fixed", document.text, result["_new"])
    if given["resolve"]:
        result |= _resolve(document, file, given, setting.facts)
    return result


def _setting(given: dict[str, Any]):
    from zerofit.check.subject import TargetHardware

    gpu = given.get("gpu")
    if gpu not in (None, "cpu"):
        find_device(gpu)  # refuses what it does not know
    precisions: tuple[str, ...] = PRECISIONS
    if gpu == "cpu":
        precisions = ("fp32", "bf16")  # fp16 needs instructions that few CPUs have
    elif gpu:
        precisions = tuple(p for p in precisions if supports(gpu, p))
    return TargetHardware(
        ranks=given.get("ranks"),
        pipeline=given.get("pipeline"),
        accelerator=None if gpu is None else "cpu" if gpu == "cpu" else "cuda",
        precisions=precisions,
        facts=_facts(given) if "model" in given else None,
    )


def _facts(given: dict[str, Any]):
    """Figures of the model, on the meta device. Importing what builds it takes seconds."""
    click.echo(f"reading the model {given['model']} ...", err=True)
    from zerofit.models.catalog import find
    from zerofit.spec.load import load_run
    from zerofit.train.probe import models_say, probe, task_of

    run = load_run(None, {k: v for k, v in given.items() if k in ("model", "model_args")}).run
    with models_say("--model"):
        source = find(run.model)
    return probe(source, task_of(source, run), None, run)


def _resolve(document: Any, file: str, given: dict[str, Any], facts: Any) -> dict[str, Any]:
    """The plain JSON and the reason of each value that the file left open. Raises UserError with all that is wrong."""
    from zerofit.config.reasons import reasons
    from zerofit.config.resolve import decide, resolve
    from zerofit.config.validate import check_model
    from zerofit.spec.errors import Problem, Problems, UserError
    from zerofit.spec.load import load_run

    if facts is None:
        message = "--resolve needs a model: bucket, prefetch and persistence sizes follow from it"
        raise UserError(Problem(kind="usage", message=message, hint="add --model NAME", where="--model"))
    flags = {k: v for k, v in given.items() if k in (*RUN_FIELDS, "model")}
    problems = Problems()
    machine = _machine(given)
    decision = decide(load_run(None, flags), document, file, machine, problems)
    problems.raise_if_any()
    check_model(decision.run, decision.layout, facts, problems)
    resolved = resolve(document.config, decision, facts, machine, decision.run.steps or STEPS, problems)
    problems.raise_if_any()
    return {"resolved": resolved, "reasons": reasons(document.config, resolved, decision, facts)}


def _machine(given: dict[str, Any]):
    """The machine that is asked about; this one, as far as nothing is said."""
    from zerofit.spec.model_facts import Machine

    gpu = given.get("gpu")
    if gpu is None:
        from zerofit.launch.machine import this_machine

        return this_machine()
    ranks = given.get("ranks", 1)
    on_cpu = gpu == "cpu"
    return Machine(
        accelerator="cpu" if on_cpu else "cuda",
        devices=ranks,
        cores=ranks,
        device_name=gpu,
        fp16=not on_cpu,
        bf16=on_cpu or supports(gpu, "bf16"),
    )


def _write_beside(path: Path, word: str, old: str, new: str) -> str | None:
    """`NAME.word.json`, never over an older one; None where nothing changed."""
    if new == old:
        return None
    from zerofit.spec.errors import Problem, UserError

    target, number = path.with_name(f"{path.stem}.{word}{path.suffix}"), 1
    while target.exists() and not _says(target, new):
        number += 1
        target = path.with_name(f"{path.stem}.{word}-{number}{path.suffix}")
    try:
        ending = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
        target.write_text(new, encoding="utf-8", newline=ending)
    except OSError as error:
        message = f"cannot write {target}: {error.strerror or error}"
        hint = "copy the file to a folder of your own first"
        raise UserError(Problem(kind="output-unwritable", message=message, hint=hint, where="FILE")) from None
    return str(target)


def _says(path: Path, text: str) -> bool:
    """Whether a file holds this text already, whatever its line ends are."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _show(result: dict[str, Any], given: dict[str, Any]) -> None:
    for problem in result["problems"]:
        _show_problem(result["file"], problem)
    if given["resolve"]:
        print(json.dumps(result["resolved"], indent=2))
    if given["explain"]:
        _show_explained(result)
    for line in result.get("lost", ()):
        click.echo(f"{click.style('lost', fg='red')}: {line}", err=True)
    for line in result.get("kept", ()):
        click.echo(f"{click.style('kept', fg='green')}: {line}", err=True)
    if result.get("written"):
        _show_difference(result)
    elif given["fix"] or given["migrate"]:
        click.echo("nothing to change", err=True)
    errors = sum(p["severity"] == "error" for p in result["problems"])
    warnings = len(result["problems"]) - errors
    click.echo(
        f"{result['file']}: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}", err=True
    )


def _show_problem(file: str, problem: dict[str, Any]) -> None:
    colour = "red" if problem["severity"] == "error" else "yellow"
    head = f"{file}:{problem['line']}:{problem['column']}"
    click.echo(
        f"{click.style(head, bold=True)}: {click.style(problem['severity'], fg=colour)}: {problem['message']} "
        f"[{problem['code']}]"
    )
    click.echo(f"    {problem['why']}")
    click.echo(f"    fix: {problem['fix']}")


def _show_explained(result: dict[str, Any]) -> None:
    """On standard error where the resolved JSON has standard output."""
    from rich.console import Console
    from rich.table import Table

    from zerofit.check.explain import shown

    console = Console(stderr="resolved" in result, width=None if sys.stdout.isatty() else 160)
    if "reasons" in result:
        table = Table("filled in", "value", "because")
        for row in result["reasons"]:
            table.add_row(row["path"], shown(row["value"]), row["why"])
        console.print(table)
    table = Table("key", "value", "status", "what it does")
    for row in result["explained"]:
        table.add_row(row["path"], shown(row["value"]), row["status"], row["text"])
    table.columns[0].overflow = "fold"
    console.print(table)


def _show_difference(result: dict[str, Any]) -> None:
    old, new = (text.splitlines(keepends=True) for text in (result["_text"], result["_new"]))
    for line in difflib.unified_diff(old, new, result["file"], result["written"]):
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[0])
        click.secho(line.rstrip("\n"), fg=colour)
    click.echo(f"written: {result['written']}", err=True)
