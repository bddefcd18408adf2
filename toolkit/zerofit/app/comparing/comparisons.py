"""The three comparisons: strategies, batch sizes and numbers of ranks. Each row is measured in separate processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from zerofit.app.comparing.processes import run_job
from zerofit.app.comparing.ranks import one_server
from zerofit.app.comparing.room import StateGate
from zerofit.app.comparing.rows import (
    Comparison,
    Mode,
    RowStore,
    ScalingRow,
    SizeRow,
    StrategyRow,
    against_one_rank,
    against_single,
    critical_batch,
    size_row,
    strategy_row,
    summarize_sizes,
)
from zerofit.app.job.resolve import find_model, open_model
from zerofit.compare.job import STRATEGIES, WARM, CompareJob, Strategy
from zerofit.doctor.software import code_hash, model_code
from zerofit.launch.host import this_machine
from zerofit.launch.hostfile import read_hostfile
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.model_facts import Task, gives_loss, has_head
from zerofit.spec.run import Run, RunRequest

ScaleLr = Literal["none", "linear", "sqrt"]

COMPARE_SEQ_LEN = 256  # shorter than for training, since every strategy trains the model in one command
SIZES = (16, 32, 64, 128, 256, 512)  # samples per step
SIZE_EPOCHS = 5
ALL_SAMPLES = 10**9  # more than any validation data has
# fields of a run that comparisons use
COMMON = {
    *("model", "model_args", "data", "data_root", "image_size", "seq_len", "tokenizer"),
    *("seed", "lr", "eval_samples"),
}
STEPPED = ("ranks", "global_batch", "steps")


@one_server()
def compare_strategies(
    run: Run | RunRequest,
    *,
    strategies: Sequence[str] | None = None,
    slow: Mapping[int, float] | None = None,
    straggle: float = 0.0,
    target: float | None = None,
    hostfile: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> Comparison[StrategyRow]:
    """Train a model with every classic strategy on the same samples; compare speed, memory, traffic and weights.

    A strategy that fails, does not fit, or cannot run on these devices gets a row with the reason. After a kill, the
    same call resumes in `run.output` or in a folder named after the comparison.

    Args:
        run: the model, data, ranks, global batch, steps and seed; the optimizer is SGD with momentum 0.9.
        strategies: names from `zerofit compare strategies --list`; all if None. "single" always runs.
        slow: for some ranks, how many times as long their steps take; every step then takes at least 0.05 s.
        straggle: probability that a rank's step takes five times as long.
        target: validation accuracy; rows of parameter servers record when they reached it.
        hostfile: hosts to run on over ssh, lines `node1 slots=2`; this machine if None.
        anyway: start even what cannot fit into the free memory.
        on_event: gets progress, and each row (kind "result") once measured.

    Raises UserError with all problems.

    >>> import zerofit as zf
    >>> run = zf.Run(model="mlp", data="digits", ranks=2, global_batch=16, steps=8)
    >>> compared = zf.compare_strategies(run, strategies=["ddp"])
    >>> [(row.strategy, row.status) for row in compared.rows]
    [('single', 'ok'), ('ddp', 'ok')]
    """
    report, problems, asked = Reporter(on_event), Problems(), RunRequest.of(run)
    chosen = list(STRATEGIES.values()) if strategies is None else _chosen(strategies, "--strategies", problems)
    own = {"slow": {str(rank): times for rank, times in (slow or {}).items()}, "straggle": straggle, "target": target}
    own["hosts"] = hosts_of(hostfile)
    job, parameters, _ = resolve_comparison(asked, set(STEPPED), problems, report, **own)
    identity = {"job": vars(job), "strategies": [one.name for one in chosen], **_code(job.model)}
    store = RowStore(asked.run.output, "strategies", identity)
    gate = StateGate(parameters=parameters, folder=store.folder, anyway=anyway)
    rows = [_measure(one, replace(job, strategy=one.name), store, one.name, gate, report) for one in chosen]
    unequal = [name for name in ("slow", "straggle", "target") if getattr(job, name)]
    about = _about(job, *STEPPED, *unequal)
    return Comparison(kind="strategies", about=about, rows=against_single(rows)).write(store.folder)


@one_server()
def compare_sizes(
    run: Run | RunRequest,
    *,
    sizes: Sequence[int] = SIZES,
    target: float = 0.95,
    scale_lr: ScaleLr = "none",
    per_rank: int | None = None,
    finish: tuple[int, int] | None = None,
    seeds: int = 3,
    hostfile: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> Comparison[SizeRow]:
    """Train a model with each batch size for `run.epochs` epochs, and compare which reaches the target first.

    Args:
        run: the model, data and epochs; `run.lr` is the learning rate of the smallest size.
        sizes: samples per step.
        target: validation accuracy.
        scale_lr: how the learning rate grows with the batch size.
        per_rank: samples per rank and step, so larger sizes use more ranks with DistributedDataParallel; all
            sizes train on one device if None.
        finish: (size, epochs): every run ends with so many epochs at this size and its learning rate.
        seeds: runs per size, with seeds counted up from `run.seed`.
        hostfile: hosts to run on over ssh, lines `node1 slots=2`; this machine if None.
        anyway: start even what cannot fit into the free memory.
        on_event: gets progress, and each row (kind "result") once measured.

    Raises UserError with all problems.

    >>> import zerofit as zf
    >>> compared = zf.compare_sizes(zf.Run(model="mlp", data="digits", epochs=1), sizes=[64], seeds=1)
    >>> [row.batch_size for row in compared.rows]
    [64]
    """
    report, problems, asked = Reporter(on_event), Problems(), RunRequest.of(run)
    epochs = whole_epochs(asked, SIZE_EPOCHS, problems)
    ranks = {size: max(1, size // per_rank) if per_rank else 1 for size in sizes}
    _check_sizes(ranks, epochs, per_rank, finish, problems)
    own = {"ranks": max(ranks.values()), "global_batch": max(sizes), "hosts": hosts_of(hostfile)}
    own["eval_samples"] = asked.run.eval_samples or ALL_SAMPLES
    job, parameters, _ = resolve_comparison(
        asked, {"epochs"}, problems, report, size_place="--sizes", has_accuracy=True, **own
    )
    question = {"sizes": list(sizes), "scale_lr": scale_lr, "per_rank": per_rank, "finish": finish, "seeds": seeds}
    question |= {"target": target, "epochs": epochs}
    store = RowStore(asked.run.output, "batch-size", {"job": vars(job), **question, **_code(job.model)})
    gate, rows = StateGate(parameters=parameters, folder=store.folder, anyway=anyway), []

    def phase(size: int, count: int) -> tuple[int, int, float]:
        times = size / min(sizes)
        return count, size, job.lr * {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[scale_lr]

    end = [phase(*finish)] if finish else []
    for size in sizes:
        phases = [phase(size, epochs - sum(count for count, _, _ in end)), *end]
        of = {"strategy": "ddp" if ranks[size] > 1 else "single", "ranks": ranks[size], "target": target}
        one = replace(job, **of, global_batch=size, lr=phases[0][2], phases=phases)
        rows += [_train(replace(one, seed=seed), store, gate, report) for seed in range(job.seed, job.seed + seeds)]
    about = {**_about(job), **{name: value for name, value in question.items() if name not in ("sizes", "seeds")}}
    summary = summarize_sizes(rows)
    critical = None if finish else critical_batch(summary)
    compared = Comparison(kind="batch-size", about=about, rows=rows, summary=summary, critical_batch=critical)
    return compared.write(store.folder)


@one_server()
def compare_scaling(
    run: Run | RunRequest,
    *,
    strategy: str = "ddp",
    hostfile: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> Comparison[ScalingRow]:
    """Train with one strategy on 1, 2, 4, ... `run.ranks` ranks: weak scaling (the batch grows) and strong scaling.

    Speed-up and efficiency are relative to one rank of the same strategy.

    Args:
        run: the model, data, ranks, global batch, steps and seed; the optimizer is SGD with momentum 0.9.
        strategy: a strategy that divides the batch over any number of ranks.
        hostfile: hosts to run on over ssh, lines `node1 slots=2`; this machine if None.
        anyway: start even what cannot fit into the free memory.
        on_event: gets progress, and each row (kind "result") once measured.

    Raises UserError with all problems.

    >>> import zerofit as zf
    >>> run = zf.Run(model="mlp", data="digits", ranks=1, global_batch=16, steps=8)
    >>> [(row.mode, row.ranks) for row in zf.compare_scaling(run).rows]
    [('weak', 1), ('strong', 1)]
    """
    report, problems, asked = Reporter(on_event), Problems(), RunRequest.of(run)
    chosen = next((one for one in _chosen([strategy], "--strategy", problems) if one.name == strategy), None)
    if chosen and (chosen.alone or chosen.one or chosen.least_ranks > 1):
        message, hint = f"{strategy} does not run on every number of ranks", "use ddp, fsdp2 or zero2, for example"
        problems.add("strategy", message, hint, "--strategy")
    job, parameters, _ = resolve_comparison(asked, set(STEPPED), problems, report, hosts=hosts_of(hostfile))
    check_counts(job, problems)
    problems.raise_if_any()
    assert chosen
    store = RowStore(asked.run.output, "scaling", {"job": vars(job), "strategy": strategy, **_code(job.model)})
    gate, rows = StateGate(parameters=parameters, folder=store.folder, anyway=anyway), []
    modes: tuple[Mode, ...] = ("weak", "strong")
    for mode, ranks in product(modes, rank_counts(job.ranks)):
        batch = job.global_batch // job.ranks * ranks if mode == "weak" else job.global_batch
        one = replace(job, strategy=strategy, ranks=ranks, global_batch=batch)
        measured = _measure(chosen, one, store, f"{mode}-{ranks}", gate, report)
        rows.append(ScalingRow(**vars(measured), mode=mode, global_batch=batch))
    about = {**_about(job, *STEPPED), "strategy": strategy}
    return Comparison(kind="scaling", about=about, rows=against_one_rank(rows)).write(store.folder)


def hosts_of(hostfile: Path | str | None) -> list[tuple[str, int]]:
    """Return names and slots of a hostfile; [] for this machine. Raises UserError."""
    return [(host.name, host.slots) for host in read_hostfile(Path(hostfile))] if hostfile else []


def whole_epochs(asked: RunRequest, usual: int, problems: Problems) -> int:
    """Return the epochs of a run; a fraction is a problem."""
    epochs = asked.run.epochs or usual
    if epochs != int(epochs):
        problems.add("bad-value", f"epochs: {epochs} is not a whole number", "use 1 or more", asked.place("epochs"))
    return int(epochs)


def rank_counts(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself."""
    return sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})


def check_counts(job: CompareJob, problems: Problems) -> None:
    """Add a problem for every number of ranks that cannot split the batch evenly."""
    for count in rank_counts(job.ranks):
        if job.global_batch % count:
            message = f"--global-batch {job.global_batch} cannot be split evenly over {count} of the ranks"
            problems.add("batch-size", message, f"use a multiple of {count} and of {job.ranks}", "--global-batch")


def _measure(
    strategy: Strategy, job: CompareJob, store: RowStore, name: str, gate: StateGate, report: Reporter
) -> StrategyRow:
    """Return a row measured before, or measure it now."""
    row = store.load(name, StrategyRow)
    if row:
        report.result(f"{name}: known", row.to_dict())
        return row
    if job.ranks < strategy.least_ranks:
        reason = f"needs {strategy.least_ranks} ranks, got {job.ranks}: use --ranks {strategy.least_ranks}"
        row = strategy_row(strategy, job, [{"not_here": reason}], 0.0)
    elif lacks := gate.lacks(strategy, job):
        row = strategy_row(strategy, job, [{"does_not_fit": lacks}], 0.0)
    else:
        began, processes = time.monotonic(), strategy.processes(job.ranks)
        reports = run_job(job, store.folder_of(name), processes, partial(_show, report, name))
        row = strategy_row(strategy, job, reports, time.monotonic() - began)
    store.save(name, row)
    shown = f"{row.samples_per_s:,.0f} samples/s" if row.samples_per_s else f"{row.status}: {row.reason}"
    report.result(f"{name}: {shown}", row.to_dict())
    return row


def _train(job: CompareJob, store: RowStore, gate: StateGate, report: Reporter) -> SizeRow:
    """Return the row of one batch size and seed, measured before or now."""
    name = f"size-{job.global_batch}-seed-{job.seed}"
    row = store.load(name, SizeRow)
    if row:
        report.result(f"{name}: known", row.to_dict())
        return row
    lacks = gate.lacks(STRATEGIES[job.strategy], job)
    if lacks:
        row = size_row(job, [{"does_not_fit": lacks}])
    else:
        show = partial(_show, report, name)
        row = size_row(job, run_job(job, store.folder_of(name), job.ranks, show))
    store.save(name, row)
    shown = row.reason if row.final_accuracy is None else f"{row.final_accuracy:.1%}"
    report.result(f"{name}: {shown}", row.to_dict())
    return row


def _show(report: Reporter, name: str, text: str) -> None:
    report.status(f"{name}: {text}")


def _chosen(names: Sequence[str], place: str, problems: Problems) -> list[Strategy]:
    """Return "single" and then the named strategies; weights are compared with those of "single"."""
    for name in names:
        if name not in STRATEGIES:
            problems.add("strategy", f"unknown strategy {name!r}", nearest(name, STRATEGIES), place)
    return [one for one in STRATEGIES.values() if one.name in names or one.name == "single"]


def resolve_comparison(
    asked: RunRequest,
    taken: set[str],
    problems: Problems,
    report: Reporter,
    size_place: str = "--global-batch",
    has_accuracy: bool = False,
    **own: Any,
) -> tuple[CompareJob, int, int]:
    """Return the job of a comparison, its model's parameters and its number of training samples; open its data once.

    `taken`: fields of the run that this comparison uses besides the common ones. `own`: values for the job. Raises
    UserError with all problems, including `problems` so far.
    """
    run, machine = asked.run, this_machine()
    for name in sorted(set(asked.places) - COMMON - taken - {"output"}):
        problems.add("conflict", f"{name} is not supported in comparisons", "remove it", asked.place(name))
    fields = COMMON | taken.intersection(STEPPED)
    given = {name: getattr(run, name) for name in fields if getattr(run, name) is not None}
    given |= {"data_root": str(run.data_root)} if run.data_root else {}
    slots = sum(count for _, count in own.get("hosts", ()))
    usual = {"strategy": "", "accelerator": machine.accelerator, "ranks": slots or machine.devices}
    job = CompareJob(**{**usual, **given, **own})
    if slots and job.ranks > slots:
        problems.add("ranks", f"{job.ranks} ranks, but {slots} slots in the hostfile", f"use {slots}", "--ranks")
    if job.steps <= WARM:
        message, where = f"{job.steps} steps are too few: the first {WARM} are not timed", asked.place("steps")
        problems.add("bad-value", message, f"use {WARM + 1} or more", where)
    if job.global_batch % job.ranks:
        below = job.global_batch // job.ranks * job.ranks
        hint = f"use {size_place} {below or job.ranks} or {below + job.ranks}"
        message = f"{size_place} {job.global_batch} cannot be split evenly over {job.ranks} ranks"
        problems.add("batch-size", message, hint, size_place)
    _check_paces(job, problems)
    if machine.accelerator == "cuda" and not slots and job.ranks > machine.devices:
        problems.add("ranks", f"{job.ranks} ranks, but {machine.devices} GPUs", f"use {machine.devices}", "--ranks")
    found = problems.attempt(lambda: find_model(asked))
    if run.partial:
        message = "comparisons do not support adapters or frozen weights"
        problems.add("conflict", message, "remove --lora, --train and --freeze", str(run.model))
    problems.raise_if_any()
    assert found
    source, task = found
    _refuse_task(run.model, task, has_accuracy)
    opened = open_model(asked, source, task, usual_seq_len=COMPARE_SEQ_LEN, report=report)
    assert opened.data
    if len(opened.data.train) < job.global_batch:
        samples = f"{len(opened.data.train)} training samples"
        message = f"{opened.data.name} has {samples}, less than one batch of {job.global_batch}"
        problems.add("batch-size", message, "use a smaller batch", size_place)
    problems.raise_if_any()
    settled = {"data": opened.run.data, "seq_len": opened.run.seq_len, "tokenizer": opened.run.tokenizer}
    return replace(job, **settled), opened.facts.parameters, len(opened.data.train)


def _check_sizes(
    ranks: Mapping[int, int], epochs: int, per_rank: int | None, finish: tuple[int, int] | None, problems: Problems
) -> None:
    """Check sizes against --per-rank and --finish; `ranks`: ranks by size."""
    for size in ranks:
        if per_rank and size % per_rank:
            message = f"{size} samples per step is not a multiple of --per-rank {per_rank}"
            problems.add("batch-size", message, f"use {per_rank}, {2 * per_rank}, ...", "--sizes")
    if finish and finish[0] % math.lcm(*ranks.values()):
        message = f"--finish: {finish[0]} samples cannot be split evenly over {max(ranks.values())} ranks"
        problems.add("batch-size", message, f"use a multiple of {math.lcm(*ranks.values())}", "--finish")
    if finish and not 0 < finish[1] < epochs:
        message = f"--finish {finish[0]}={finish[1]}: the run has {epochs} epochs"
        hint = f"use 1 to {epochs - 1}" if epochs > 1 else "raise --epochs"
        problems.add("bad-value", message, hint, "--finish")


def _check_paces(job: CompareJob, problems: Problems) -> None:
    for rank, times in job.slow.items():
        if not 0 <= int(rank) < job.ranks:
            message, hint = f"--slow {rank}={times:g}: the run has {job.ranks} ranks", f"use ranks 0 to {job.ranks - 1}"
            problems.add("ranks", message, hint, "--slow")
        if not 1 <= times <= 1000:
            message = f"--slow {rank}={times:g}: bad factor for the time of its steps"
            problems.add("bad-value", message, "use 1 to 1000", "--slow")
    if not 0 <= job.straggle <= 1:
        problems.add("bad-value", f"--straggle {job.straggle:g} is not a probability", "use 0 to 1", "--straggle")


def _refuse_task(model: str, task: Task, has_accuracy: bool) -> None:
    """Raise a UserError if comparisons do not support the model's task."""
    if gives_loss(task):
        message = f"{model} ({task}) computes its own loss; comparisons need logits"
        hint = "use a classifier or a language model; `zerofit tune` compares layouts of this model"
    elif has_head(task):
        message = f"{model} ({task}) labels padded texts, which comparisons do not support"
        hint = "use a language model of this kind, without --task"
    elif has_accuracy and task == "gan":
        message, hint = f"{model} has no accuracy", "use a classifier or a language model"
    else:
        return
    raise UserError(Problem(kind="model-task", message=message, hint=hint, where="MODEL"))


def _code(model: str) -> dict[str, Any]:
    """Return the hash of a user's model code, so rows from before and after a change do not mix."""
    place = model_code(model)
    return {"code": code_hash(place) if place else None}


def _about(job: CompareJob, *more: str) -> dict[str, Any]:
    more = (*more, "hosts") if job.hosts else more
    return {name: getattr(job, name) for name in ("model", "model_args", "data", "lr", "seed", "accelerator", *more)}
