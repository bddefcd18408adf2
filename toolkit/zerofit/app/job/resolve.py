"""Turn a requested run into a job that can train. All is checked before a process starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from zerofit.app.job.hub_models import with_local_model
from zerofit.app.job.model_facts import facts_of, max_positions_of
from zerofit.app.job.requests import assumed_inputs, from_saved
from zerofit.check.aliases import documented_config
from zerofit.check.document import Document, of_data
from zerofit.config.decide import Decision, decide, resolve, where, with_recipe
from zerofit.config.ds_json import read_for_run
from zerofit.config.recipe import Kind
from zerofit.config.validate import check_machine, check_model, most_stages
from zerofit.data.base import Data
from zerofit.data.opening import check_data, default_data, open_data
from zerofit.data.tokenizer import has_tokenizer
from zerofit.launch.host import this_machine
from zerofit.launch.ops import libaio_problems
from zerofit.models.build import why_whole
from zerofit.models.catalog import PRETRAINED, ModelSource, is_cnn, source_config, source_of
from zerofit.models.hf_config import notes_of_config
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.models.pretrained_notes import notes_of_pretrained
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError, models_say
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, Machine, ModelFacts, Task, is_text
from zerofit.spec.named_code import unrelated_modules
from zerofit.spec.profiling import Numbers
from zerofit.spec.run import AUTO, LARGEST, Run, RunRequest
from zerofit.spec.run_folder import Job
from zerofit.spec.units import counted
from zerofit.train.optimizer import missing_kernels
from zerofit.train.probe import check_sizes, fed_with, task_of

DEFAULT_EPOCHS = 1.0
ASSUMED_STEPS = 1000  # steps of a run without data or steps; only learning rate schedulers use this number

# How a request becomes a job. Each step needs the results of the earlier steps, and only the last needs data:
#
#   request ─► saved model's name, hub snapshot, stages of `--pipeline auto`   `resolve_job`
#           ─► model source and task, DeepSpeed JSON, degrees, batch sizes     `_decide`       (no data, no model)
#           ─► data, inputs, facts of the model on the meta device             `open_model`
#           ─► steps, learning rate, schedule, filled-in DeepSpeed JSON        `config.decide.resolve`
#
# Problems are collected in one list. It is raised if the next step cannot run with these problems, so a user sees
# as many problems as possible at once.


@dataclass(frozen=True, kw_only=True)
class InputSource:
    """Where the inputs of a job come from.

    Kinds: "data" opens the run's data, or the default data of the task. "assumed" opens data only if the run names
    data; otherwise it uses `image` or the model's published inputs. "published" opens nothing and returns the facts
    of the published model, without FLOPs. "unopened" is like "published", but a text model gets inputs of tokens.
    """

    kind: Literal["data", "assumed", "unopened", "published"] = "data"
    image: str | None = None  # "image:3x224x224": the assumed inputs of an image model


DATA, PUBLISHED, UNOPENED = InputSource(), InputSource(kind="published"), InputSource(kind="unopened")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with its data, inputs and facts."""

    run: Run  # with data, tokenizer and sequence length decided
    data: Data | None  # None: no data was opened
    inputs: Inputs | None  # None: as the model was published
    facts: ModelFacts


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A job with all values decided. No folder has been created, and nothing has started."""

    job: Job
    ds_source: dict[str, object]  # the user's DeepSpeed JSON with documented key names, "auto" values included
    machine: Machine
    inputs: Inputs | None


def resolve_job(
    request: RunRequest,
    *,
    machine: Machine | None = None,
    inputs: InputSource = DATA,
    report: Reporter | None = None,
    problems: Problems | None = None,
    check_task: Callable[[Task, Problems], None] | None = None,
    model: nn.Module | None = None,
) -> ResolvedJob:
    """Decide and check everything about a run; every command makes its `Job` only here.

    Args:
        request: the run, and where each of its values was given. `ds_config` is the JSON (as a dict) or its name.
        machine: the devices of all hosts together (`cluster_machine` for a described cluster); this machine if None.
        inputs: where the model's inputs come from.
        report: gets notes about the data, warnings about the JSON and progress.
        problems: problems found so far, raised together with the problems found here.
        check_task: further checks by the caller, given the model's task.
        model: an existing model to use instead of the one that the run names.

    Raises UserError with all problems.
    """
    report, problems = report or Reporter(), Problems() if problems is None else problems
    local, machine = machine is None, machine or this_machine()
    request = with_stages(with_local_model(from_saved(request), report), machine.devices, report)
    # The order follows what each step needs: the layout needs the JSON, the facts need the model and the data. Rates
    # need the steps, and the final JSON needs all of them.
    source, task, document, decision = _decide(
        request, machine, problems, local=local, check_task=check_task, model=model
    )
    for warning in decision.warnings:
        report.warning(f"{warning.message}. {warning.why}", where(warning, document, ds_place(request.run)))
    request = replace(request, run=decision.run)
    opened = open_model(request, source, task, inputs=inputs, report=report, model=model)
    decision = replace(decision, run=opened.run)
    check_model(decision.run, decision.layout, opened.facts, problems)
    steps = decision.run.steps or ASSUMED_STEPS
    if opened.data and inputs == DATA:
        steps = _steps(decision, opened.data, problems)
    _check_profiled(request, decision.layout.world_size, steps, problems)
    decision = with_recipe(decision, kind_of(source, task), opened.facts, steps)
    if opened.data:
        for field, (readers, reads) in _READERS.items():
            if field in request.places and not reads(decision.run, task):
                report.warning(f"{field} has no effect: only {readers} read it", request.place(field))
    ds_source = documented_config(document.config)
    ds_config = resolve(ds_source, decision, opened.facts, machine, steps, problems)
    problems.raise_if_any()
    job = Job(
        run=decision.run,
        layout=decision.layout,
        batch=decision.batch,
        steps=steps,
        facts=opened.facts,
        ds_config=ds_config,
    )
    return ResolvedJob(job=job, ds_source=ds_source, machine=machine, inputs=opened.inputs)


def with_stages(request: RunRequest, devices: int, report: Reporter) -> RunRequest:
    """Replace `--pipeline auto` with the number of stages that zerofit selects for `devices`."""
    run, layers = request.run, None
    if run.pipeline != AUTO:
        return request
    with suppress(UserError):  # `_decide` raises it with all other problems
        layers = facts_of(*find_model(request), None, run).layers
    stages = most_stages(run, ranks := run.ranks or devices, layers)
    if stages == 1:
        report.note(
            f"{request.place('pipeline')}: auto chooses 1 stage for {counted(ranks, 'rank')}, so no pipeline is used"
        )
    return request.updated(pipeline=stages)


def _decide(
    request: RunRequest,
    machine: Machine,
    problems: Problems,
    *,
    local: bool,
    check_task: Callable[[Task, Problems], None] | None,
    model: nn.Module | None,
) -> tuple[ModelSource, Task, Document, Decision]:
    """Decide and check everything that needs neither data nor the built model.

    `local`: the run is on this machine. Raises UserError with all problems.
    """
    run, place, kind = request.run, ds_place(request.run), "transformer"
    if run.fit:
        message = f"{request.place('fit')} works only with `zerofit train` and `launch`, which choose the layout"
        hint = "remove it; `zerofit plan` ranks layouts for any hardware"
        problems.add("conflict", message, hint, request.place("fit"))
    if model is not None and run.partial:
        message, hint = "zerofit trains a model object unchanged", "freeze weights or add adapters in your own code"
        problems.add("conflict", message, hint, "lora, train, freeze")
    model_and_task = problems.attempt(lambda: find_model(request, model))
    document = problems.attempt(lambda: ds_document(run))
    if run.data is not None:
        problems.attempt(lambda: check_data(run.data or "", model_and_task[1] if model_and_task else None))
    if model_and_task:
        kind = kind_of(*model_and_task)
        if check_task:
            check_task(model_and_task[1], problems)
    if run.steps and run.epochs:
        problems.add("conflict", "steps and epochs are both given", "use one of them", "--steps and --epochs")
    decision = None
    if document is not None:
        # DeepSpeed imports classes that the JSON names, so they must be the model's or a known library's.
        problems.extend(unrelated_modules(documented_config(document.config), run.model))
        decision = decide(request, document, place, machine, problems, kind)
        check_machine(decision.run, decision.layout, machine, problems)
        # Kernels and libraries of other machines are checked on them (`zerofit launch` examines its hosts).
        missing = missing_kernels(decision.run.optimizer, machine.accelerator if local else None)
        problems.extend([missing] if missing else [])
        if local:
            problems.extend(libaio_problems(documented_config(document.config)))
    problems.raise_if_any()
    assert model_and_task and document and decision
    return (*model_and_task, document, decision)


def open_model(
    request: RunRequest,
    source: ModelSource,
    task: Task,
    *,
    inputs: InputSource = DATA,
    usual_seq_len: int = DEFAULT_SEQ_LEN,
    report: Reporter | None = None,
    model: nn.Module | None = None,
) -> OpenedModel:
    """Open the data of a model (see `resolve_job`) and read the model's facts. Raises UserError."""
    report = report or Reporter()
    run, kind, data, model_inputs = request.run, inputs.kind, None, None
    name = run.data or (default_data(task) if kind == "data" else None)
    seq_len, tokenizer = seq_len_of(run, source, task, usual_seq_len), run.tokenizer
    if "tokenizer" not in request.places and is_text(task):
        tokenizer = _own_tokenizer(source) or tokenizer
    run = run.model_copy(update={"data": name, "tokenizer": tokenizer, "seq_len": seq_len})
    if name is not None and kind in ("data", "assumed"):
        data = open_data(run, task, seq_len, report)
        model_inputs = data.inputs
        report.note(*data.notes)
        if task == "image" and isinstance(model_inputs, ImageInputs) and model_inputs.classes < 2:
            message = f"{data.name} has only one class, so there is nothing to learn"
            hint = "put the images of each class into a separate folder"
            raise UserError(Problem(kind="data-classes", message=message, hint=hint, where="--data"))
    elif kind == "assumed" or (kind == "unopened" and is_text(task)):
        model_inputs = assumed_inputs(source, task, seq_len, inputs.image, dict(run.model_args))
    facts = facts_of(source, task, model_inputs, run, model)
    # Other models are built parameter by parameter, so that no rank needs memory for all of them.
    reason = why_whole(source, model_inputs, dict(run.model_args)) if facts.own and model is None else None
    if reason:
        report.note(f"each rank builds the full {run.model} in float32, not one parameter at a time: {reason}")
    if isinstance(model_inputs, ImageInputs) and model is None:
        check_sizes(source, model_inputs, run)
    if source.family == "transformers":
        report.note(*notes_of_config(source.name, source_config(source)))
    with models_say("--pretrained"):
        if model is None:
            report.note(*notes_of_pretrained(source, model_inputs, dict(run.model_args)))
    return OpenedModel(run=run, data=data, inputs=model_inputs, facts=facts)


def _own_tokenizer(source: ModelSource) -> str | None:
    """Return the folder of the model's own tokenizer; None without weights and tokenizer."""
    # Weights work only with their own tokenizer. A folder with weights but no tokenizer is refused when it is opened.
    weights = source.pretrained or (source.path if source.origin == PRETRAINED else None)
    path = weights or source.path
    if not path:
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return str(folder) if weights or has_tokenizer(folder) else None


def find_model(request: RunRequest, model: nn.Module | None = None) -> tuple[ModelSource, Task]:
    """Return the source and the task of the named model, or of `model`. Raises UserError."""
    if model is not None:
        source = ModelSource(name=request.run.model, family="custom", origin="given", task="custom")
        return source, fed_with(model, request.run)
    with models_say(request.place("model")):
        source = source_of(request.run)
    return source, task_of(source, request.run)


def kind_of(source: ModelSource, task: Task) -> Kind:
    """Return the model's kind, which decides its optimization defaults."""
    if task == "gan":
        return "gan"
    if source.partial and source.partial.lora:
        return "adapters"
    if source.origin == PRETRAINED or source.pretrained:
        return "pretrained-cnn" if is_cnn(source) else "pretrained"
    return "cnn" if is_cnn(source) else "transformer"


def ds_place(run: Run) -> str:
    """Return where the DeepSpeed JSON comes from, for messages."""
    return run.ds_config if isinstance(run.ds_config, str) else "ds_config"


def ds_document(run: Run) -> Document:
    """Return the DeepSpeed JSON as the user wrote it: from the run, a file or a bundled JSON."""
    if isinstance(run.ds_config, dict):
        return of_data(run.ds_config)
    return read_for_run(ds_name(run) or "")


def ds_name(run: Run) -> str | None:
    """Return the file or bundled name of the run's JSON; None if the run contains the JSON.

    Without a JSON, return the name of the default.
    """
    if run.ds_config is not None:
        return run.ds_config if isinstance(run.ds_config, str) else None
    default = "zero2"
    # each degree has its own JSON; the last JSON that is used counts, since it allows the fewest ZeRO stages
    for name in ("tensor_parallel", "sequence_parallel", "pipeline"):
        default = name if getattr(run, name) != 1 else default
    return default


def seq_len_of(run: Run, source: ModelSource, task: Task, usual: int = DEFAULT_SEQ_LEN) -> int | None:
    """Return the tokens per sample; None for models without text.

    This is `run.seq_len` if it is set, else the smaller of `usual` and the model's limit.
    """
    if not is_text(task):
        return None
    if run.seq_len:
        return run.seq_len
    return min(usual, max_positions_of(source, dict(run.model_args)) or usual)


def cluster_machine(cluster: Cluster) -> Machine:
    """Return a described cluster as a machine, to check runs against it."""
    device = cluster.device
    if cluster.on_cpu:
        return replace(this_machine(), accelerator="cpu", devices=cluster.ranks)
    return Machine(
        accelerator="cuda",
        devices=cluster.ranks,
        cores=cluster.ranks,
        device_name=device.name,
        fp16="fp16" in device.tflops,
        bf16="bf16" in device.tflops,
        here=False,
    )


_LABELLED = ("classify", "tag", "seq2seq-lm")
_WITHOUT_IMAGES = ("causal-lm", "masked-lm", "speech", "table", *_LABELLED)
# options that some runs do not read: which runs do, in words and as a condition
_READERS: dict[str, tuple[str, Callable[[Run, Task], bool]]] = {
    "image_size": ("models of images", lambda run, task: task not in _WITHOUT_IMAGES),
    "text_field": ("--data jsonl: and hf:", lambda run, task: (run.data or "").startswith(("jsonl:", "hf:"))),
    "pair_field": (f"--task {', '.join(_LABELLED)}", lambda run, task: task in _LABELLED),
    "label_field": (f"--task {', '.join(_LABELLED)}", lambda run, task: task in _LABELLED),
    "target_len": ("--task seq2seq-lm", lambda run, task: task == "seq2seq-lm"),
    "generate_samples": ("--task seq2seq-lm", lambda run, task: task == "seq2seq-lm"),
    "min_lr": ("--schedule cosine and linear", lambda run, task: run.schedule != "constant"),
    "pipeline_balance": ("--pipeline 2 and more", lambda run, task: run.pipeline != 1),
    "profile_ranks": ("--profile", lambda run, task: run.profile is not None),
}


def _steps(decision: Decision, data: Data, problems: Problems) -> int:
    run, samples = decision.run, len(data.train)
    if decision.layout.dp > samples:
        message = f"{decision.layout.dp} data parallel ranks, but {data.name} has {samples} training samples"
        problems.add(
            "ranks", message, f"use at most {samples} ranks (--ranks), shorter sequences, or more data", "--ranks"
        )
    if run.steps:
        return run.steps
    if run.stream:
        problems.add("steps", f"{data.name} is a stream without an end", "set --steps", "--steps")
        return 1
    samples_seen = samples * (run.epochs or DEFAULT_EPOCHS)
    if samples_seen / decision.batch.total > LARGEST:
        message = f"--epochs {run.epochs} of {samples:,} samples are more than {LARGEST:,} steps"
        problems.add("steps", message, "use fewer, or set --steps", "--epochs")
        return 1
    return max(1, -(-int(samples_seen) // decision.batch.total))  # rounded up: the last batch is filled


def _check_profiled(request: RunRequest, ranks: int, steps: int, problems: Problems) -> None:
    if request.run.profile is None:
        return
    last_step, last_rank = Numbers.parse(request.run.profile).last, Numbers.parse(request.run.profile_ranks).last
    if last_step > steps:
        message = f"cannot profile step {last_step}: the run has {counted(steps, 'step')}"
        problems.add("bad-value", message, f"use steps from 1 to {steps}", request.place("profile"))
    if last_rank >= ranks:
        message = f"cannot profile rank {last_rank}: the run has {counted(ranks, 'rank')}"
        problems.add("bad-value", message, f"use ranks from 0 to {ranks - 1}", request.place("profile_ranks"))
