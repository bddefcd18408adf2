"""Simulations side by side, each in a process of its own that is forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from zerofit.models.catalog import ModelError
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.errors import Problem, UserError

POLL_S = 0.2


def simulate_all(targets: Sequence[SimulationTarget], show: Callable[[str], None]) -> list[dict[str, Any] | Problem]:
    """The answer of `rank.simulate` for each target, or the reason why there is none; `show` hears how far they are.

    As many run at a time as there are cores.
    """
    with tempfile.TemporaryDirectory() as folder, _pool(len(targets)) as pool:
        words = [Path(folder) / str(n) for n in range(len(targets))]
        futures = [pool.submit(_one, t, str(word)) for t, word in zip(targets, words, strict=True)]
        start = time.monotonic()
        try:
            while wait(futures, POLL_S).not_done:
                show(_progress(futures, words, time.monotonic() - start))
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        return [_result(future) for future in futures]


def _result(future: Future[Any]) -> dict[str, Any] | Problem:
    try:
        return future.result()
    except BrokenProcessPool:
        message = "a simulation's process was killed from outside, most often by the kernel for want of memory"
        hint = "simulate fewer layers (--model-args), or one rank (--rank)"
        return Problem(kind="killed", message=message, hint=hint)


def _pool(tasks: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zerofit.simulate.forkserver_preload"])
    workers = max(1, min(tasks, len(os.sched_getaffinity(0))))
    return ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1)


def _progress(futures: list[Future[Any]], words: list[Path], seconds: float) -> str:
    done = sum(future.done() for future in futures)
    now = [word.read_text() for word, future in zip(words, futures, strict=True) if word.exists() and not future.done()]
    what = f": {', '.join(now)}" if now else ": importing torch and DeepSpeed" if not done else ""
    count = f" {done} of {len(futures)} done" if len(futures) > 1 else ""
    return f"simulating{what}{count} ({seconds:.0f} s)"


def _one(target: SimulationTarget, word: str) -> dict[str, Any] | Problem:
    """In the forked process."""
    log = Path(word).with_suffix(".log")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from zerofit.simulate.rank import simulate

    def say(text: str) -> None:
        Path(word).write_text(text)

    try:
        return simulate(target, say=say)
    except UserError as error:
        return error.problems[0]
    except ModelError as error:
        return Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")
