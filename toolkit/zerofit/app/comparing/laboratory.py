"""Run every experiment with one model, each in its own folder, and write one page about all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zerofit.app.comparing.comparisons import compare_scaling, compare_sizes, compare_strategies
from zerofit.app.comparing.jobs import COMMON, STEPPED, ComparisonSetup, rank_counts
from zerofit.app.comparing.processes import one_server
from zerofit.app.comparing.rows import Comparison, RowStore
from zerofit.compare.job import CompareJob
from zerofit.report.page import render
from zerofit.spec.events import OnEvent
from zerofit.spec.files import write_text
from zerofit.spec.local_machine import versions
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.units import counted

COMPARISONS: dict[str, Callable[..., Comparison[Any]]] = {
    "strategies": compare_strategies,
    "scaling": compare_scaling,
    "batch-size": compare_sizes,
}
# The learning rates of all batch-size rules are equal at the job's own batch, so that the rules differ only elsewhere.
UNEQUAL = ["ddp", "parameter-server", "parameter-server-async", "parameter-server-ssp", "backup-workers"]
SLOW = 4.0  # factor by which the last rank's steps are slower
LAST_SIZE, LAST_SHARE = 16, 5  # small batches for the last fifth of a run's epochs
LABORATORY_EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment: a question, and the comparison that answers it."""

    name: str  # its folder
    question: str
    kind: str
    options: Mapping[str, Any]  # fields of the run and options of the comparison


class Done(NamedTuple):
    """A finished experiment."""

    experiment: Experiment
    command: str  # command line that repeats it
    compared: Comparison[Any]


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """All experiments in order, and the page about them."""

    experiments: Sequence[Done]
    written: Sequence[str]

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit compare all --json` prints."""
        experiments = [
            {"name": experiment.name, "question": experiment.question, "command": command, **compared.to_dict()}
            for experiment, command, compared in self.experiments
        ]
        return {"kind": "all", "experiments": experiments, "written": list(self.written)}


def experiments(job: CompareJob, samples: int, epochs: int, seeds: int, target: float) -> Iterator[Experiment]:
    """Yield all experiments, sized by the job and by `samples`, the number of training samples."""
    counts = rank_counts(job.ranks)
    steps = {"global_batch": job.global_batch, "steps": job.steps, "lr": job.lr}
    for ranks in counts:
        question = f"How fast is each strategy on {counted(ranks, 'rank')}, and how much does it send?"
        options = {"ranks": ranks, **steps}
        yield Experiment(name=f"strategies-{ranks}", question=question, kind="strategies", options=options)
    question = "How far does data parallelism scale, with a growing batch and with a fixed one?"
    yield Experiment(name="scaling", question=question, kind="scaling", options={"ranks": job.ranks, **steps})
    study = {"target": target, "seeds": seeds, "epochs": epochs}
    # Powers of four up to all samples: the number of steps dominates at one end, the number of epochs at the other.
    sizes = [4**n for n in range(samples.bit_length()) if 4**n < samples] + [samples]
    rules = {"none": ("a fixed", 1.0), "linear": ("a proportional", 1.0 / job.global_batch)}
    rules["sqrt"] = ("a square-root", job.global_batch**-0.5)
    for rule, (words, factor) in rules.items():  # all equal the job's learning rate at the job's batch
        question = f"Which batch size reaches the target first, with {words} learning rate?"
        options = {"sizes": sizes, "scale_lr": rule, "lr": job.lr * factor, **study}
        yield Experiment(name=f"batch-size-{rule}", question=question, kind="batch-size", options=options)
    larger = [size for size in sizes if size > LAST_SIZE]
    last = max(1, epochs // LAST_SHARE)
    if larger and epochs > last:
        question = "Does it help to use small batches at the end of a run?"
        options = {"sizes": larger, "finish": (LAST_SIZE, last), "lr": job.lr, **study}
        yield Experiment(name="batch-size-finish", question=question, kind="batch-size", options=options)
    question = "Does a model learn as well on more ranks, if batch and learning rate grow with them?"
    sizes = [job.global_batch * count for count in counts if job.global_batch * count <= samples]
    options = {"sizes": sizes, "per_rank": job.global_batch, "scale_lr": "linear", "lr": job.lr, **study}
    yield Experiment(name="ranks", question=question, kind="batch-size", options=options)
    if job.ranks > 1:
        question = f"When do asynchronous strategies win? One rank is {SLOW:g} times slower."
        unequal = {"strategies": UNEQUAL, "slow": {job.ranks - 1: SLOW}, "target": target}
        options = {"ranks": job.ranks, **steps, **unequal}
        yield Experiment(name="unequal", question=question, kind="strategies", options=options)


@one_server()
def compare_all(
    run: Run | RunRequest,
    *,
    target: float = 0.9,
    seeds: int = 3,
    hostfile: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> Laboratory:
    """Run every experiment with a model, and write one page about all of them into `run.output`.

    After a kill the same call resumes and keeps earlier measurements.

    Args:
        run: the model, data, ranks, global batch, steps, epochs, learning rate (for the global batch) and seed.
        target: validation accuracy.
        seeds: runs per batch size.
        hostfile: hosts to run on over ssh, lines `node1 slots=2`; this machine if None.
        anyway: start even what cannot fit into the free memory.
        on_event: gets progress, and each row (kind "result") once measured.

    Raises UserError with all problems.
    """
    setup = ComparisonSetup(run, hostfile, on_event)
    shared = {"hostfile": str(hostfile)} if hostfile else {}
    epochs = setup.epochs(LABORATORY_EPOCHS)
    job = setup.resolve({*STEPPED, "epochs"}, has_accuracy=True)
    setup.check_counts(job)
    request = setup.request
    study = {"target": target, "seeds": seeds, "epochs": epochs}
    store = RowStore(request.run.output, "all", {"job": vars(job), **study})
    common = {name: getattr(request.run, name) for name in request.places if name in COMMON - {"lr"}}
    done = []
    for experiment in experiments(job, setup.samples, **study):
        setup.report.status(f"{experiment.name}: {experiment.question}")
        folder = store.folder_of(experiment.name)
        done.append(conduct(experiment, folder, common, shared, anyway=anyway, on_event=on_event))
    sections = [_section(finished, store.folder_of(finished.experiment.name)) for finished in done]
    devices = "GPUs" if job.accelerator == "cuda" else "CPU ranks"
    title = f"{job.model} on {job.data}: up to {job.ranks} {devices}, seed {job.seed}"
    return Laboratory(experiments=done, written=[str(write_laboratory(store.folder, title, sections))])


def _section(done: Done, folder: Path) -> Evidence:
    columns, rows = done.compared.page_table()
    missing = ", ".join(f"`{name}`" for name, _ in done.compared.missing())
    notes = [f"Without results: {missing}. The file results.json lists the reasons."] if missing else []
    home = f"rows/{folder.name}"
    notes.append(f"[page]({home}/comparison.html), [figures]({home}/results.json)")
    content = {"columns": columns, "rows": rows, "picture": folder / "comparison.png", "notes": notes}
    return Evidence(title=done.experiment.question, command=done.command, **content)


def conduct(
    experiment: Experiment,
    folder: Path,
    common: Mapping[str, object],
    shared: Mapping[str, object] | None = None,
    **how: object,
) -> Done:
    """Run one experiment in a folder.

    `common`: fields of the run. `shared` and `how`: options of the comparison.
    """
    shared = shared or {}
    of_run = {name: value for name, value in experiment.options.items() if name in Run.model_fields}
    options = {name: value for name, value in experiment.options.items() if name not in of_run}
    compared = COMPARISONS[experiment.kind](Run(**{**common, **of_run}, output=folder), **options, **shared, **how)
    return Done(experiment, command(experiment, {**common, **shared}), compared)


def command(experiment: Experiment, common: Mapping[str, object]) -> str:
    """Return the command line that repeats an experiment.

    `common`: the fields that the runs of all experiments share.
    """
    options = {"model": Run().model, **common, **experiment.options}
    return shlex.join(["zerofit", "compare", experiment.kind, *flags(options)])


def flags(options: Mapping[str, object]) -> list[str]:
    """Return command-line arguments for fields and options: the model first, then the flags."""
    words = [str(options["model"])]
    for name, value in options.items():
        if name != "model":
            words += [word for text in _texts(value) for word in (f"--{name.replace('_', '-')}", text)]
    return words


def _texts(value: object) -> list[str]:
    """Return the command-line texts of an option's value. A repeated option has several texts."""
    match value:
        case dict() if all(isinstance(key, int) for key in value):
            return [f"{key}={part:g}" for key, part in value.items()]
        case dict():
            return [json.dumps(value)]
        case list():
            return [",".join(map(str, value))]
        case tuple():
            return ["=".join(map(str, value))]
        case float():
            return [f"{value:.6g}"]
    return [str(value)]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A table of measurements or forecasts, with its title, command, notes and picture."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""  # Markdown above the table
    command: str = ""  # makes only this table
    notes: Sequence[str] = ()  # a list below it
    picture: Path | None = None  # a file below the page's folder
    figures: Mapping[str, object] = field(default_factory=dict)  # the numbers, as plain data


def _table_row(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def write_laboratory(folder: Path, title: str, sections: Sequence[Evidence]) -> Path:
    """Write README.md into `folder`, which has the sections' pictures. Return its path."""
    page = folder / "README.md"
    write_text(page, render("laboratory.md.jinja", title=title, sections=sections, **evidence_values(page)))
    return page


def evidence_values(page: Path) -> dict[str, object]:
    """Return the values that the template evidence.md.jinja needs on every page."""
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {"versions": used, "home": page.parent.absolute(), "line": _table_row}
