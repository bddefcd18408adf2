"""From a run as asked to a job that ranks can start on: everything is checked here, before any process starts."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zerofit.app.prepare_folder import find_folder
from zerofit.app.resume import find_start
from zerofit.check.document import Document, of_data
from zerofit.cli.progress import StatusLine
from zerofit.config.ds_json import find_config, read_document
from zerofit.config.json_findings import where
from zerofit.config.resolve import Decision, decide, resolve
from zerofit.config.validate import check_machine, check_model
from zerofit.data import Data, default_data, open_data, split_name
from zerofit.launch.machine import this_machine
from zerofit.models.build import source_max_positions
from zerofit.models.catalog import ModelSource, find
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.load import RunRequest
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.spec.task import DEFAULT_SEQ_LEN, Task, is_text
from zerofit.spec.versions import versions
from zerofit.train.probe import models_say, probe, task_of

DEFAULT_EPOCHS = 1.0


def prepare(asked: RunRequest, progress: Reporter, machine: Machine | None = None) -> tuple[Job, RunFolder, Machine]:
    """Check everything, prepare the data and make the run folder. Raises UserError with all that is wrong.

    `machine`: the devices of all hosts together; None: those of this one.
    """
    problems = Problems()
    machine = machine or this_machine()
    folder = problems.attempt(lambda: find_folder(asked.run))
    job, ds_source = decided(asked, progress, machine, problems)
    assert folder
    with StatusLine() as line:
        job = replace(job, start=find_start(job, folder, _note, line.show))
    _make(folder, job, ds_source, machine)
    return job, folder, machine


def decided(asked: RunRequest, progress: Reporter, machine: Machine, problems: Problems) -> tuple[Job, dict[str, Any]]:
    """The job with everything decided, and the DeepSpeed JSON as the user has it; no folder is made.

    Raises UserError with all that is wrong, and what `problems` has by now.
    """
    source = problems.attempt(lambda: find_model(asked))
    document = problems.attempt(lambda: ds_document(asked.run))
    task = problems.attempt(lambda: task_of(source, asked.run)) if source else None
    data_name = problems.attempt(lambda: _data_name(asked, task))
    if asked.run.steps and asked.run.epochs:
        problems.add("conflict", "steps and epochs are both given", "give one of them", "--steps and --epochs")
    decision = None
    if document is not None:
        decision = decide(asked, document, ds_place(asked.run), machine, problems)
        check_machine(decision.run, decision.layout, machine, problems)
    problems.raise_if_any()
    assert source and task and document and decision and data_name
    for warning in decision.warnings:
        click.echo(f"warning: {warning.message}. {warning.why}", err=True)
        click.echo(f"     at: {where(warning, document, ds_place(asked.run))}", err=True)
    tokenizer = _tokenizer(asked, source)
    decision = _with(decision, data=data_name, tokenizer=tokenizer, seq_len=seq_len_of(decision.run, source, task))
    data = open_data(decision.run, task, decision.run.seq_len, progress)
    for note in data.notes:
        _note(note)
    if task == "image" and data.inputs.classes < 2:
        message = f"{data.name} holds one class: there is nothing to tell apart"
        problems.add("data-classes", message, "give each class a folder of its own", "--data")
        problems.raise_if_any()
    facts = probe(source, task, data.inputs, decision.run)
    check_model(decision.run, decision.layout, facts, problems)
    steps = _steps(decision, data, problems)
    ds_config = resolve(document.config, decision, facts, machine, steps, problems)
    problems.raise_if_any()
    job = Job(
        run=decision.run, layout=decision.layout, batch=decision.batch, steps=steps, facts=facts, ds_config=ds_config
    )
    return job, document.config


def find_model(asked: RunRequest) -> ModelSource:
    """The source behind the model's name. Raises UserError."""
    with models_say(asked.place("model")):
        return find(asked.run.model)


def ds_place(run: Run) -> str:
    """Where the DeepSpeed JSON stands, for messages."""
    return run.ds_config if isinstance(run.ds_config, str) else "ds_config"


def ds_document(run: Run) -> Document:
    """The DeepSpeed JSON as the user wrote it: in the run file itself, in a file, or one of ours."""
    if isinstance(run.ds_config, dict):
        return of_data(run.ds_config)
    default = "zero2"
    for name, degree in (("pipeline", run.pipeline), ("tensor_parallel", run.tensor_parallel)):
        default = name if degree > 1 else default
    if run.sequence_parallel > 1:
        default = "sequence_parallel"
    return read_document(find_config(run.ds_config or default))


def _data_name(asked: RunRequest, task: Task | None) -> str | None:
    if asked.run.data is not None:
        split_name(asked.run.data)  # refuses what it does not know
        return asked.run.data
    return default_data(task) if task else None


def _tokenizer(asked: RunRequest, source: ModelSource) -> str:
    """The tokenizer as asked for; else the one that lies with a pretrained model."""
    own = Path(source.path or "")
    if "tokenizer" not in asked.places and source.path and (own / "tokenizer.json").is_file():
        return source.path
    return asked.run.tokenizer


def seq_len_of(run: Run, source: ModelSource, task: Task, usual: int = DEFAULT_SEQ_LEN) -> int | None:
    """Tokens of a sample: as asked, else the usual number or what the model takes; None for images."""
    if not is_text(task):
        return None
    if run.seq_len:
        return run.seq_len
    return min(usual, source_max_positions(source, dict(run.model_args)) or usual)


def _with(decision: Decision, **fields: Any) -> Decision:
    return replace(decision, run=decision.run.model_copy(update=fields))


def _steps(decision: Decision, data: Data, problems: Problems) -> int:
    """Optimizer steps: as asked, or whole passes over the data rounded up to a whole step."""
    run, samples = decision.run, len(data.train)
    if decision.layout.dp > samples:
        problems.add(
            "ranks",
            f"{decision.layout.dp} data parallel ranks for {samples} training samples of {data.name}",
            f"take --ranks {samples} or less, shorter sequences, or more data",
            "--ranks",
        )
    if run.steps:
        return run.steps
    return max(1, -(-int(samples * (run.epochs or DEFAULT_EPOCHS)) // decision.batch.total))


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def _make(folder: RunFolder, job: Job, ds_source: dict[str, Any], machine: Machine) -> None:
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(kind="output-unwritable", message=f"cannot make the run folder: {error}", where="--output")
        raise UserError(problem) from None
    job.write(folder, ds_source)
    write_json(
        folder.env,
        {
            "versions": versions(),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "accelerator": machine.accelerator,
            "device": machine.device_name,
            "devices": machine.devices,
            "cores": machine.cores,
        },
    )
