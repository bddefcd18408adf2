"""Compare strategies, batch sizes and numbers of ranks. Own processes measure each row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

from zerofit.app.comparing.jobs import STEPPED, ComparisonSetup, rank_counts, shortage_of_states
from zerofit.app.comparing.processes import one_server, run_job
from zerofit.app.comparing.rows import (
    AnyRow,
    Comparison,
    Kind,
    Mode,
    RowStore,
    ScalingRow,
    SizeRow,
    StrategyRow,
    critical_batch,
    size_row,
    strategy_row,
    summarize_sizes,
    with_speedups,
)
from zerofit.compare.job import STRATEGIES, CompareJob, RankReport, Strategy
from zerofit.doctor.facts import code_hash, model_code
from zerofit.spec.errors import Problems, nearest
from zerofit.spec.events import OnEvent
from zerofit.spec.run import Run, RunRequest

ScaleLr = Literal["none", "linear", "sqrt"]

SIZES = (16, 32, 64, 128, 256, 512)  # samples per step
SIZE_EPOCHS = 5
ALL_SAMPLES = 10**9  # more than any validation data has


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
    """Train a model with every classic strategy on the same samples, and compare the strategies.

    They are compared by speed, memory, traffic and weights. A strategy that fails, does not fit, or cannot run on these
    devices gets a row with the reason. After a kill, the same call resumes in `run.output` or in a folder named after
    the comparison.

    Args:
        run: the model, data, ranks, global batch, steps and seed; the optimizer is SGD with momentum 0.9.
        strategies: names from `zerofit compare strategies --list`; all if None. "single" always runs.
        slow: rank -> factor by which this rank's steps take longer. With `slow`, every step takes at least 0.05 s.
        straggle: probability that a rank's step takes five times as long.
        target: validation accuracy; rows of parameter servers record when they reached this accuracy.
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
    setup = ComparisonSetup(run, hostfile, on_event)
    chosen = _named(strategies, "--strategies", setup.problems) if strategies is not None else list(STRATEGIES.values())
    factors = {str(rank): factor for rank, factor in (slow or {}).items()}
    job = setup.resolve(set(STEPPED), slow=factors, straggle=straggle, target=target)
    question = {"strategies": [strategy.name for strategy in chosen]}
    runner = _RowRunner(setup, "strategies", job, question, anyway)
    rows = [runner.strategy_row(strategy.name, strategy, job) for strategy in chosen]
    # The facts on the page name these settings only if they were used.
    unequal = [name for name in ("slow", "straggle", "target") if getattr(job, name)]
    rows = with_speedups(rows, lambda row, base: base.strategy == "single")
    about = _about(job, *STEPPED, *unequal)
    return Comparison(kind="strategies", about=about, rows=rows).write(runner.store.folder)


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
    """Train a model with each batch size, and compare which size reaches the target first.

    Args:
        run: the model, data and epochs; `run.lr` is the learning rate of the smallest size.
        sizes: samples per step.
        target: validation accuracy.
        scale_lr: how the learning rate grows with the batch size.
        per_rank: samples per rank and step, so larger sizes use more ranks with DistributedDataParallel; all
            sizes train on one device if None.
        finish: (size, epochs): every run trains its last `epochs` with this batch size and this size's learning rate.
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
    setup = ComparisonSetup(run, hostfile, on_event)
    epochs = setup.epochs(SIZE_EPOCHS)
    ranks = {size: max(1, size // per_rank) if per_rank else 1 for size in sizes}
    _check_sizes(ranks, epochs, per_rank, finish, setup.problems)
    largest = {"ranks": max(ranks.values()), "global_batch": max(sizes)}
    evaluated = setup.request.run.eval_samples or ALL_SAMPLES
    # The largest size needs the most ranks and samples, so it stands for all sizes in the checks.
    job = setup.resolve({"epochs"}, batch_option="--sizes", has_accuracy=True, eval_samples=evaluated, **largest)
    question = {"scale_lr": scale_lr, "per_rank": per_rank, "finish": finish, "target": target, "epochs": epochs}
    runner = _RowRunner(setup, "batch-size", job, {**question, "sizes": list(sizes), "seeds": seeds}, anyway)

    def phase(size: int, count: int) -> tuple[int, int, float]:
        """Return epochs, samples per step and learning rate."""
        growth = size / min(sizes)
        return count, size, job.lr * {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[scale_lr]

    last = [phase(*finish)] if finish else []
    rows = []
    for size, seed in product(sizes, range(job.seed, job.seed + seeds)):
        phases = [phase(size, epochs - (finish[1] if finish else 0)), *last]
        strategy = "ddp" if ranks[size] > 1 else "single"
        settings = {"ranks": ranks[size], "global_batch": size, "lr": phases[0][2], "phases": phases, "seed": seed}
        rows.append(runner.size_row(replace(job, strategy=strategy, target=target, **settings)))
    summary = summarize_sizes(rows)
    # The formula is for one batch size during the whole run.
    critical = None if finish else critical_batch(summary)
    about = _about(job) | question
    compared = Comparison(kind="batch-size", about=about, rows=rows, summary=summary, critical_batch=critical)
    return compared.write(runner.store.folder)


@one_server()
def compare_scaling(
    run: Run | RunRequest,
    *,
    strategy: str = "ddp",
    hostfile: Path | str | None = None,
    anyway: bool = False,
    on_event: OnEvent | None = None,
) -> Comparison[ScalingRow]:
    """Train with one strategy on 1, 2, 4, ... `run.ranks` ranks, and compare the speeds.

    In weak scaling, the batch grows with the ranks; in strong scaling, it stays the same. Speed-up and efficiency are
    relative to one rank of the same strategy.

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
    setup = ComparisonSetup(run, hostfile, on_event)
    named = _named([strategy], "--strategy", setup.problems)
    chosen = next((candidate for candidate in named if candidate.name == strategy), None)  # without "single"
    if chosen and (chosen.alone or chosen.one or chosen.least_ranks > 1):
        message, hint = f"{strategy} does not run on every number of ranks", "use ddp, fsdp2 or zero2, for example"
        setup.problems.add("strategy", message, hint, "--strategy")
    job = setup.resolve(set(STEPPED))
    setup.check_counts(job)
    assert chosen
    runner, rows = _RowRunner(setup, "scaling", job, {"strategy": strategy}, anyway), list[ScalingRow]()
    modes: tuple[Mode, ...] = ("weak", "strong")
    for mode, ranks in product(modes, rank_counts(job.ranks)):
        batch = job.global_batch // job.ranks * ranks if mode == "weak" else job.global_batch
        row = runner.strategy_row(f"{mode}-{ranks}", chosen, replace(job, ranks=ranks, global_batch=batch))
        rows.append(ScalingRow(**vars(row), mode=mode, global_batch=batch))
    rows = with_speedups(rows, lambda row, base: base.mode == row.mode and base.ranks == 1)
    about = {**_about(job, *STEPPED), "strategy": strategy}
    return Comparison(kind="scaling", about=about, rows=rows).write(runner.store.folder)


class _RowRunner:
    """Measure the rows of one comparison. Rows stored in its folder are not measured again."""

    def __init__(
        self, setup: ComparisonSetup, kind: Kind, job: CompareJob, question: Mapping[str, object], anyway: bool
    ):
        """Open the folder of rows. Raises UserError if it has other contents.

        `question`: inputs of the rows, besides the job.
        """
        code = model_code(job.model)  # rows from before and after a change of a user's model must not mix
        identity = {"job": vars(job), **question, "code": code_hash(code) if code else None}
        self.store, self._report = RowStore(setup.request.run.output, kind, identity), setup.report
        self._parameters, self._anyway = setup.parameters, anyway

    def strategy_row(self, name: str, strategy: Strategy, job: CompareJob) -> StrategyRow:
        job = replace(job, strategy=strategy.name)
        return self._row(name, StrategyRow, job, lambda reports, s: strategy_row(strategy, job, reports, s))

    def size_row(self, job: CompareJob) -> SizeRow:
        name = f"size-{job.global_batch}-seed-{job.seed}"
        return self._row(name, SizeRow, job, lambda reports, _: size_row(job, reports))

    def _row(
        self, name: str, kind: type[AnyRow], job: CompareJob, make: Callable[[Sequence[RankReport], float], AnyRow]
    ) -> AnyRow:
        """Return a stored row, or measure it.

        `make` builds the row from the processes' reports and the elapsed seconds.
        """
        row = self.store.load(name, kind)
        if row:
            self._report.result(f"{name}: known", row.to_dict())
            return row
        # Rows are stored one by one, so the same command continues after a kill.
        began = time.monotonic()
        reports = self._refused(job) or run_job(
            job, self.store.folder_of(name), lambda text: self._report.status(f"{name}: {text}")
        )
        row = make(reports, time.monotonic() - began)
        self.store.save(name, row)
        self._report.result(f"{name}: {row.headline}", row.to_dict())
        return row

    def _refused(self, job: CompareJob) -> list[RankReport]:
        """Return reports with the reason why the processes cannot start; [] if they can."""
        strategy = STRATEGIES[job.strategy]
        if job.ranks < strategy.least_ranks:
            reason = f"needs {strategy.least_ranks} ranks, got {job.ranks}: use --ranks {strategy.least_ranks}"
            return [{"not_here": reason}]
        if self._anyway:
            return []
        shortage = shortage_of_states(strategy, job, self._parameters, self.store.folder)
        return [{"does_not_fit": shortage}] if shortage else []


def _named(names: Sequence[str], option: str, problems: Problems) -> list[Strategy]:
    """Return the named strategies and "single", whose weights are the reference."""
    for name in names:
        if name not in STRATEGIES:
            problems.add("strategy", f"unknown strategy {name!r}", nearest(name, STRATEGIES), option)
    return [strategy for strategy in STRATEGIES.values() if strategy.name in names or strategy.name == "single"]


def _check_sizes(
    ranks: Mapping[int, int], epochs: int, per_rank: int | None, finish: tuple[int, int] | None, problems: Problems
) -> None:
    for size in ranks:
        if per_rank and size % per_rank:
            message = f"{size} samples per step is not a multiple of --per-rank {per_rank}"
            problems.add("batch-size", message, f"use {per_rank}, {2 * per_rank}, ...", "--sizes")
    # Runs of different sizes have different numbers of ranks. All of them must be able to share the last batch size.
    if finish and finish[0] % math.lcm(*ranks.values()):
        message = f"--finish: {finish[0]} samples cannot be split evenly over {max(ranks.values())} ranks"
        problems.add("batch-size", message, f"use a multiple of {math.lcm(*ranks.values())}", "--finish")
    if finish and not 0 < finish[1] < epochs:
        message = f"--finish {finish[0]}={finish[1]}: the run has {epochs} epochs"
        hint = f"use 1 to {epochs - 1}" if epochs > 1 else "raise --epochs"
        problems.add("bad-value", message, hint, "--finish")


def _about(job: CompareJob, *names: str) -> dict[str, object]:
    names = (*names, "hosts") if job.hosts else names
    return {name: getattr(job, name) for name in ("model", "model_args", "data", "lr", "seed", "accelerator", *names)}
