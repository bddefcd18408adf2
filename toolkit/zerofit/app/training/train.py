"""Training on this machine: in the foreground, or in the background with a handle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from zerofit.app.fitting.fit import fitted, leaner_next
from zerofit.app.job.requests import as_request
from zerofit.app.training.memory_gate import MemoryGate
from zerofit.app.training.prepare_folder import PreparedRun, make_ready, prepare
from zerofit.app.training.result import TrainingResult, finished_before
from zerofit.app.training.run_ranks import run_ranks
from zerofit.launch.hostfile import Host
from zerofit.launch.local import LaunchSite, local_site
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.launch.run_lock import CommandLock
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent, Reporter, shielded
from zerofit.spec.files import read_jsonl
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run, RunRequest
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.supervise import Watch


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
    for note in make_ready(prepared.folder, prepared.job.start):
        report.note(note)
    return prepared, None


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
