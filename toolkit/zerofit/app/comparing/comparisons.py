"""The three comparisons: what is to be measured, one row after the other, and the files that result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zerofit.app.comparing.processes import run_job
from zerofit.app.comparing.rows import RowStore, against_one_rank, against_single, failure, strategy_row
from zerofit.app.resolve import seq_len_of
from zerofit.cli.console import EventConsole
from zerofit.cli.progress import StatusLine
from zerofit.compare.catalog import STRATEGIES, Strategy
from zerofit.compare.job import CompareJob
from zerofit.data import default_data, open_data
from zerofit.doctor.software import code_hash, model_code
from zerofit.launch.machine import this_machine
from zerofit.models.catalog import find
from zerofit.report.compare_files import write_comparison
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.task import Task
from zerofit.train.probe import models_say, probe, task_of

ALL = 10**9  # validation samples
COMPARE_SEQ_LEN = 256  # shorter than a training's: every strategy trains the model in one sitting
SIZE_FIGURES = (
    *("seconds", "epochs_to_target", "seconds_to_target", "final_accuracy", "best_accuracy", "curve", "noise_scale"),
)
STEPPED = ("ranks", "global_batch", "steps")


def compare_strategies(model: str, names: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """All strategies on one job."""
    problems = Problems()
    chosen = _chosen(names, "--strategies", problems)
    output, job = options.pop("output", None), _job(model, options, problems)
    rows = RowStore(
        output, "strategies", {"job": vars(job), "strategies": [one.name for one in chosen], **_code(model)}
    )
    found = []
    with StatusLine() as line:
        for strategy in chosen:
            found.append(_measured(strategy, replace(job, strategy=strategy.name), rows, strategy.name, line))
    against_single(found)
    return write_comparison(rows.folder, "strategies", _about(job, *STEPPED), found)


def compare_sizes(model: str, own: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Batch sizes times seeds, each a run of its own."""
    problems = Problems()
    sizes, target, epochs = own["sizes"], own["target"], own["epochs"]
    output = options.pop("output", None)
    largest = {"ranks": 1, "global_batch": max(sizes), "eval_samples": options.pop("eval_samples", ALL)}
    job = _job(model, {**options, **largest}, problems, batch_flag="--sizes")
    if _task(job) == "gan":
        hint = "take a classifier or a language model"
        raise UserError(Problem(kind="model-task", message=f"{model} has no accuracy", hint=hint, where="MODEL"))
    job = replace(job, epochs=epochs, target=target, strategy="single")
    rows = RowStore(output, "batch-size", {"job": vars(job), **own, **_code(model)})
    found = []
    with StatusLine() as line:
        for size in sizes:
            for seed in range(job.seed, job.seed + own["seeds"]):
                lr = job.lr * _scale(own["scale_lr"], size / min(sizes))
                found.append(_trained(replace(job, global_batch=size, lr=lr, seed=seed), rows, line))
    about = _about(job) | {"target": target, "scale_lr": own["scale_lr"], "epochs": epochs}
    return write_comparison(rows.folder, "batch-size", about, found, summary=by_size(found))


def compare_scaling(model: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One strategy on 1, 2, 4, ... ranks; efficiency is that beside one rank of the same strategy."""
    problems = Problems()
    chosen = [one for one in _chosen(name, "--strategy", problems) if one.name == name]
    output = options.pop("output", None)
    if any(one.alone or one.one or one.least_ranks > 1 for one in chosen):
        message, hint = f"{name} does not run on any number of ranks", "take ddp, fsdp2, zero2 or the like"
        problems.add("strategy", message, hint, "--strategy")
    job = _job(model, options, problems)
    for mode, count in _ladder(job.ranks):
        if mode == "strong" and job.global_batch % count:
            message = f"--global-batch {job.global_batch} cannot be shared out over {count} of the ranks"
            problems.add("batch-size", message, f"take a multiple of {count} and of {job.ranks}", "--global-batch")
    problems.raise_if_any()
    rows = RowStore(output, "scaling", {"job": vars(job), "strategy": name, **_code(model)})
    found = []
    with StatusLine() as line:
        for mode, ranks in _ladder(job.ranks):
            batch = job.global_batch // job.ranks * ranks if mode == "weak" else job.global_batch
            one = replace(job, strategy=name, ranks=ranks, global_batch=batch)
            found.append(
                {**_measured(chosen[0], one, rows, f"{mode}-{ranks}", line), "mode": mode, "global_batch": batch}
            )
    against_one_rank(found)
    return write_comparison(rows.folder, "scaling", {**_about(job, *STEPPED), "strategy": name}, found)


def _ladder(most: int) -> Iterator[tuple[str, int]]:
    """Powers of two up to the most, and the most itself; each weak and strong."""
    counts = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    yield from ((mode, count) for mode in ("weak", "strong") for count in counts)


def _measured(strategy: Strategy, job: CompareJob, rows: RowStore, name: str, line: StatusLine) -> dict[str, Any]:
    """One row: of before, or measured now."""
    known = rows.known(name)
    if known:
        line.say(f"{name}: known")
        return known
    if job.ranks < strategy.least_ranks:
        reason = f"needs {strategy.least_ranks} ranks, and has {job.ranks}: --ranks {strategy.least_ranks}"
        words, seconds = [{"not_here": reason}], 0.0
    else:
        began = time.monotonic()
        words = run_job(job, rows.place(name), strategy.processes(job.ranks), lambda t: line.show(f"{name}: {t}"))
        seconds = time.monotonic() - began
    row = strategy_row(strategy, job, words, seconds)
    rows.keep(name, row)
    shown = f"{row['samples_per_s']:,.0f} samples/s" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
    line.say(f"{name}: {shown}")
    return row


def _trained(job: CompareJob, rows: RowStore, line: StatusLine) -> dict[str, Any]:
    """One batch size with one seed."""
    name = f"size-{job.global_batch}-seed-{job.seed}"
    known = rows.known(name)
    if known:
        line.say(f"{name}: known")
        return known
    words = run_job(job, rows.place(name), 1, lambda text: line.show(f"{name}: {text}"))
    row: dict[str, Any] = {"batch_size": job.global_batch, "seed": job.seed, "lr": job.lr, **failure(words)}
    row |= dict.fromkeys(SIZE_FIGURES)
    if row["status"] == "ok":
        row |= size_figures(words[0]["curve"], job.target or 1.0) | words[0]
    rows.keep(name, row)
    line.say(f"{name}: {row['final_accuracy']:.1%}" if row["status"] == "ok" else f"{name}: {row['reason']}")
    return row


def size_figures(curve: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """What a run has come to; None where the target was not reached."""
    reached = next((point for point in curve if point["accuracy"] >= target), None)
    return {
        "seconds": curve[-1]["seconds"],
        "epochs_to_target": reached["epoch"] if reached else None,
        "seconds_to_target": reached["seconds"] if reached else None,
        "final_accuracy": curve[-1]["accuracy"],
        "best_accuracy": max(point["accuracy"] for point in curve),
    }


def by_size(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a batch size over its seeds: how many reached the target, [median, least, most] of the figures."""
    found = []
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        mine = [row for row in rows if row["batch_size"] == size and row["status"] == "ok"]
        reached = [row for row in mine if row["seconds_to_target"] is not None]
        known = {"seconds_to_target": reached, "final_accuracy": mine, "seconds": mine, "noise_scale": mine}
        figures = {name: _spread([row[name] for row in those if row[name]]) for name, those in known.items()}
        found.append({"batch_size": size, "runs": len(mine), "reached": len(reached), **figures})
    return found


def _spread(values: Sequence[float]) -> list[float] | None:
    return [statistics.median(values), min(values), max(values)] if values else None


def _scale(how: str, times: float) -> float:
    return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[how]


def _chosen(names: str | None, flag: str, problems: Problems) -> list[Strategy]:
    """Those that were asked for, the single device first: its weights are what others are compared with."""
    if names is None:
        return list(STRATEGIES.values())
    asked = [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in STRATEGIES:
            problems.add("strategy", f"unknown strategy {name!r}", nearest(name, STRATEGIES), flag)
    return [one for one in STRATEGIES.values() if one.name in asked or one.name == "single"]


def _job(model: str, options: dict[str, Any], problems: Problems, batch_flag: str = "--global-batch") -> CompareJob:
    """The job as asked. Raises UserError with all that is wrong, what `problems` has by now included."""
    machine = this_machine()
    values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    here = {"ranks": machine.devices, "accelerator": machine.accelerator}
    job = CompareJob(**{"strategy": "", "model": model, **here, **values})
    if job.global_batch % job.ranks:
        below = job.global_batch // job.ranks * job.ranks
        hint = f"take {batch_flag} {below or job.ranks} or {below + job.ranks}"
        message = f"{batch_flag} {job.global_batch} cannot be shared out over {job.ranks} ranks"
        problems.add("batch-size", message, hint, batch_flag)
    if machine.accelerator == "cuda" and job.ranks > machine.devices:
        problems.add("ranks", f"{job.ranks} ranks for {machine.devices} GPUs", f"take {machine.devices}", "--ranks")
    task = problems.attempt(lambda: _task(job))
    problems.raise_if_any()
    assert task
    source = find(job.model)
    job = replace(job, seq_len=seq_len_of(job.run, source, task, COMPARE_SEQ_LEN))
    data = open_data(job.run, task, job.seq_len, Reporter(EventConsole()))
    for note in data.notes:
        click.echo(f"note: {note}", err=True)
    problems.attempt(lambda: probe(source, task, data.inputs, job.run))
    if len(data.train) < job.global_batch:
        message = f"{len(data.train)} training samples of {data.name} are less than one batch of {job.global_batch}"
        problems.add("batch-size", message, "take a smaller batch", batch_flag)
    problems.raise_if_any()
    return replace(job, data=job.data or default_data(task))


def _task(job: CompareJob) -> Task:
    with models_say("MODEL"):
        return task_of(find(job.model), job.run)


def _code(model: str) -> dict[str, Any]:
    """What a model of the user's own consists of: rows of before and after a change must not mix."""
    place = model_code(model)
    return {"code": code_hash(place) if place else None}


def _about(job: CompareJob, *more: str) -> dict[str, Any]:
    return {name: getattr(job, name) for name in ("model", "model_args", "data", "lr", "seed", "accelerator", *more)}
