"""Run code on untrusted input, such as a chat template, in a process with limits."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

T = TypeVar("T")

SECONDS = 10  # processor time per step; the longest conversations need hundredths of a second
MORE_BYTES = 1 << 30  # limit of additional memory, in bytes


class Exceeded(Exception):
    """The process has exceeded a limit, which the message names."""


# Why a process: a template can loop for ever or build huge texts within one call of Python or C. Only the operating
# system can stop such a template. A fork takes milliseconds and inherits the imported modules. A limit of address space
# ends a single allocation, and ITIMER_PROF counts processor time, so a busy machine does not end the work.
def limited(work: Callable[[T], object], items: Sequence[T]) -> Iterator[Any]:
    """Yield the result of `work` for each item, from a forked process. Raises Exceeded.

    Results are passed as JSON. `work` calls `begin_step` before each part of unbounded length.
    """
    reading, writing = os.pipe()
    # Avoids a warning of tokenizers at every fork; the child never tokenizes.
    with patch.dict(os.environ, TOKENIZERS_PARALLELISM=os.environ.get("TOKENIZERS_PARALLELISM", "true")):
        child = os.fork()
    if child == 0:
        os.close(reading)  # if the parent is killed, writing then fails and the child exits
        # The child never returns from `_work`. Otherwise it would continue the parent's program.
        _work(work, items, writing)
    os.close(writing)
    status = None
    try:
        with open(reading, encoding="utf-8") as answers:
            for _ in items:
                if not (line := answers.readline()).endswith("\n"):  # the child may be killed within a line
                    _, status = os.waitpid(child, 0)
                    raise Exceeded(_why_ended(status))
                yield json.loads(line)
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def begin_step() -> None:
    """Allow `SECONDS` of processor time from now on. After that, the system kills the process."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)


def _work(work: Callable[[T], object], items: Sequence[T], writing: int) -> NoReturn:
    """Write each result as a line of JSON. Exit without the parent's exit handlers."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)  # the system can then end the process even during a call into C
        # The limit is of address space, most of which the child shares with its parent: it comes on top of that.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        allowed = pages * resource.getpagesize() + MORE_BYTES
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)  # negative: unlimited
        resource.setrlimit(resource.RLIMIT_AS, (allowed if hard_limit < 0 else min(allowed, hard_limit), hard_limit))
        with open(writing, "w", encoding="utf-8") as answers:
            for item in items:
                answers.write(json.dumps(work(item)) + "\n")
        status = 0
    except MemoryError:
        status = 2
    finally:
        os._exit(status)


def _why_ended(status: int) -> str:
    """Return why the child ended early, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        limit = f"{SECONDS} seconds of processor time"
        return f"needs more than {limit}" if number == signal.SIGPROF else f"died of {signal.Signals(number).name}"
    if os.WEXITSTATUS(status) == 2:
        return f"needs more than {MORE_BYTES >> 30} GiB of memory"
    return "ended without an answer"
