"""Training on this machine: in the foreground, or in the background with a handle."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from zerofit.app.fitting.fit import fitted, leaner_next
from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import ResolvedJob, resolve_job
from zerofit.app.planning.job_forecast import forecast_step_s
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.app.training.prepare_folder import find_folder, find_start, make_ready
from zerofit.app.training.result import TrainingResult, finished_before
from zerofit.app.training.run_ranks import run_ranks
from zerofit.launch.hostfile import Host
from zerofit.launch.local import LaunchSite, local_site
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.launch.run_lock import CommandLock
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter, shielded
from zerofit.spec.files import read_jsonl, write_json
from zerofit.spec.local_machine import versions
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import FittedLayout, Job, MemoryForecast, RunFolder
from zerofit.spec.stages import stages_of
from zerofit.watch.supervise import Watch

Gate = Callable[[RunRequest, ResolvedJob, Path], MemoryForecast | None]
Fitter = Callable[[RunRequest, RunFolder], tuple[RunRequest, FittedLayout | None]]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A job that is ready for ranks to start, and its folder."""

    job: Job
    folder: RunFolder
    machine: Machine


@overload
def train(
    run: Run | RunRequest | str | Path,
    *,
    wait: Literal[True] = True,
    on_event: OnEvent | None = None,
    handle_signals: bool = False,
    anyway: bool = False,
) -> TrainingResult: ...
@overload
def train(
    run: Run | RunRequest | str | Path, *, wait: Literal[False], on_event: OnEvent | None = None, anyway: bool = False
) -> TrainingRun: ...
def train(
    run: Run | RunRequest | str | Path,
    *,
    wait: bool = True,
    on_event: OnEvent | None = None,
    handle_signals: bool = False,
    anyway: bool = False,
) -> TrainingResult | TrainingRun:
    """Train on the devices of this machine, in a separate process for each rank.

    Works in any thread of a script, notebook or server.

    >>> import zerofit as zf
    >>> run = zf.Run(model="mlp", data="digits", steps=20, ranks=1, output="runs/mlp")
    >>> result = zf.train(run)
    >>> result.steps, result.run_dir.endswith("runs/mlp")
    (20, True)

    Args:
        run: a `Run`, or the path of a run file or of a run folder, which resumes from its newest checkpoint.
        wait: if True, return the result when the training has ended. If False, return a handle (`TrainingRun`) when the
            run is checked and its ranks are starting.
        on_event: gets events (`zerofit.Event`), from the thread that supervises the ranks.
        handle_signals: the first SIGTERM, SIGHUP or SIGUSR1 to this process asks the ranks to save and stop. Needs
            the main thread and `wait`.
        anyway: also start a run that does not fit.

    Raises:
        UserError: with all problems of the run (also with `wait=False`).
        DoesNotFit: too little free memory or disk here; nothing was written.
        RunFailed: the ranks failed (out of memory, NaN, a rank died).
        Stopped: the ranks stopped on request and saved a checkpoint.
    """
    if handle_signals and not (wait and threading.current_thread() is threading.main_thread()):
        message = "handle_signals=True needs wait=True and the main thread, where Python sets signal handlers"
        raise UserError(Problem(kind="usage", message=message, hint="remove it; TrainingRun.stop() stops a run"))
    report = Reporter(shielded(on_event) if on_event else None)
    with ExitStack() as stack:
        prepared, finished = claim(as_request(run), report, stack, anyway=anyway)
        if finished:
            return finished if wait else TrainingRun(prepared.folder, lambda: finished)
        # The run stays locked and its memory reserved until the training has ended, which may be after this call.
        lock = stack.pop_all()

    def work() -> TrainingResult:
        with lock, closing(Watch("127.0.0.1")) as watch:
            site = local_site(prepared.job, prepared.machine)
            return train_at(site, prepared, watch, report, handle_signals=handle_signals)

    return work() if wait else TrainingRun(prepared.folder, work)


def claim(
    request: RunRequest,
    report: Reporter,
    stack: ExitStack,
    *,
    anyway: bool = False,
    machine: Machine | None = None,
    hosts: Sequence[Host] = (),
) -> tuple[PreparedRun, TrainingResult | None]:
    """Check a run and prepare its folder. Memory and folder stay reserved until `stack` closes.

    `machine`: the devices of all hosts together. `hosts`: the hosts of the ranks, this host first. If the run uses
    only this machine, omit both. If the run is already complete, also return its result.
    """
    gate = stack.enter_context(closing(MemoryGate(report, anyway=anyway, hosts=hosts or None)))
    fitter = partial(fitted, report=report, gate=gate, anyway=anyway, machine=machine, hosts=hosts)
    prepared = prepare(request, report, machine, CommandLock(stack, report.status), gate=gate, fitter=fitter)
    # A complete run keeps its result and its logs, which `make_ready` would remove.
    finished = finished_before(prepared.job, prepared.folder)
    if finished:
        report.note(f"all {prepared.job.steps} steps of this run are done; a larger --steps continues it")
        return prepared, finished
    report.note(*make_ready(prepared.folder, prepared.job.start))
    return prepared, None


def prepare(
    request: RunRequest,
    report: Reporter,
    machine: Machine | None = None,
    lock: CommandLock | None = None,
    model: nn.Module | None = None,
    gate: Gate | None = None,
    fitter: Fitter | None = None,
) -> PreparedRun:
    """Resolve the run, find the checkpoint to resume from and create the run folder.

    `machine`: the devices of all hosts together; this machine if None. `lock`: locks the run folder before files are
    written into it. `model`: used instead of the run's model. `gate`: forecasts memory. If the run does not fit, the
    gate raises an error before any file is written. `fitter`: chooses the layout if the run requests it.
    Raises UserError with all problems.
    """
    # If `zerofit launch` starts the ranks again, the command has locked the folder already.
    problems = Problems()
    folder = (lock and lock.folder) or problems.attempt(lambda: find_folder(request.run))
    fit = None
    if fitter and folder:
        request, fit = fitter(request, folder)
    elif fitter:  # still report all other problems
        request = request.updated(fit=False)
    resolved = resolve_job(request, machine=machine, report=report, problems=problems, model=model)
    assert folder
    if stages := stages_of(resolved.job):
        report.stages(stages)
    forecast = gate(request, resolved, folder.path) if gate else None
    step_s = forecast_step_s(resolved) if gate and machine is None else None
    start = find_start(resolved.job, folder, report)
    batch = resolved.job.batch
    if start and start.shares:
        batch = replace(batch, by_rank=start.shares)
    job = replace(resolved.job, batch=batch, start=start, forecast=forecast, fit=fit, step_s=step_s)
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(kind="output-unwritable", message=f"cannot create the run folder: {error}", where="--output")
        raise UserError(problem) from None
    if lock:
        lock.take(folder)
    job.write(folder, resolved.ds_source)
    device = {name: getattr(resolved.machine, name) for name in ("accelerator", "devices", "cores")}
    python = {"versions": versions(), "python": sys.version.split()[0], "platform": platform.platform()}
    write_json(folder.env, {**python, **device, "device": resolved.machine.device_name})
    return PreparedRun(job=job, folder=folder, machine=resolved.machine)


def train_at(
    site: LaunchSite,
    prepared: PreparedRun,
    watch: Watch,
    report: Reporter,
    *,
    attempt: int = 1,
    handle_signals: bool = False,
) -> TrainingResult:
    """Start the ranks of a prepared job at a site, supervise them, and return their result."""
    # One process compiles the ops before the ranks start. Otherwise all ranks would wait for the first to compile.
    build_ops(needed_ops(prepared.job.ds_config, prepared.machine), site.env(""), report.phase)
    with leaner_next(prepared.folder, site.again):
        result = run_ranks(prepared.folder, site, watch, report, attempt=attempt, handle_signals=handle_signals)
        return TrainingResult.of(prepared.folder, result)


class TrainingRun:
    """A handle of a training in the background, returned by `zerofit.train(run, wait=False)`.

    >>> import zerofit as zf
    >>> job = zf.train(zf.Run(model="mlp", data="digits", steps=20, ranks=1, output="runs/later"), wait=False)
    >>> result = job.result()
    >>> len(job.metrics()), job.done(), job.folder.name
    (20, True, 'later')
    """

    def __init__(self, folder: RunFolder, work: Callable[[], TrainingResult]):
        self._folder, self._ended = folder, Future[TrainingResult]()

        def supervise() -> None:
            try:
                self._ended.set_result(work())
            except BaseException as error:
                self._ended.set_exception(error)

        threading.Thread(target=supervise, name=f"zerofit {folder.path.name}").start()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of all steps so far, as in metrics.jsonl."""
        return read_jsonl(self._folder.metrics) if self._folder.metrics.exists() else []

    def stop(self) -> None:
        """Ask the ranks to save a checkpoint and stop. `result()` then raises Stopped."""
        if not self.done():
            self._folder.stop_request.touch()

    def done(self) -> bool:
        """Return whether the run has ended, with or without success."""
        return self._ended.done()

    def result(self, timeout: float | None = None) -> TrainingResult:
        """Wait for the end, at most `timeout` seconds, and return the result.

        Raises TimeoutError, RunFailed, and Stopped if the ranks stopped on request.
        """
        return self._ended.result(timeout)
