"""Explain why a simulation's process ended without a result."""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.extras import missing_extra
from zerofit.spec.units import shown_bytes

T = TypeVar("T")

OUT_OF_MEMORY, EXITED, KILLED, CRASHED = "out-of-memory", "exit", "killed", "crashed"  # kinds of problems
_FAILED = (OUT_OF_MEMORY, KILLED, CRASHED)  # not the fault of the simulated model or script
LINES = 6  # of output that are shown
ERROR_LINES = 3  # of an exception's message
MAY_FIT = "changes that may fit"  # the simulations of knobs, as progress and notes name them
HINT = "free some memory on this machine, simulate fewer layers or one rank (--rank), or use a larger machine"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
_MEMORY_ERRORS = re.compile(
    r"\bMemoryError\b|[Cc]annot allocate memory|can't allocate memory|failed to map segment|std::bad_alloc"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)  # Python's faulthandler
_NOT_IMPORTED = re.compile(r"^(?:ImportError|ModuleNotFoundError): (.+)", re.MULTILINE)
_LIBRARY = ("/site-packages/", "/lib/python", "/zerofit/", "<")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that this machine is out of memory.

    It may come from Python, torch or the loader.
    """
    return (
        isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or is_about_memory(str(error))
    )


def is_about_memory(text: str) -> bool:
    """Return whether the last lines of an output report too little memory."""
    return bool(_MEMORY_ERRORS.search(text[-2000:]))  # a script may have caught an earlier MemoryError


def out_of_memory(peak_bytes: int = 0) -> Problem:
    """Return the problem of a simulation that needs more memory than this machine has."""
    taken = f" (the simulated process used {shown_bytes(peak_bytes)})" if peak_bytes else ""
    return Problem(
        kind=OUT_OF_MEMORY, message=f"this machine has too little memory for the simulation{taken}", hint=HINT
    )


def optional(work: Callable[[], T], instead: T, what: str, report: Reporter) -> T:
    """Return the result of `work`. If `work` fails, report a note and return `instead`.

    So if an optional search fails, earlier results are not lost.
    """
    try:
        return work()
    except Exception as error:
        report.note(f"{what}: left out, because {why_it_failed(error)}")
        return instead


def why_it_failed(error: Exception) -> str:
    """Return in one line why something could not be computed."""
    if lacks_memory(error):
        return out_of_memory().message
    if isinstance(error, UserError):
        return error.problems[0].message
    if missing := missing_extra(error):
        return f"{missing.message} ({missing.hint})"
    return f"zerofit failed ({type(error).__name__}: {next(iter(last_lines(str(error), 1)), '')})"


def note_failed(outcomes: Sequence[object], what: str, report: Reporter) -> None:
    """Report how many optional simulations failed, and why the first one did."""
    failed = [one for one in outcomes if isinstance(one, Problem) and one.kind in _FAILED]
    if failed:
        report.note(f"{what}: {len(failed)} of {len(outcomes)} left out, because {failed[0].message}")


def broken_environment(output: str) -> Problem | None:
    """Return the problem of a failed import; None if no import failed.

    `output`: the output of the process that imported.
    """
    found = _NOT_IMPORTED.findall(output)
    if not found:
        return None
    message = f"the installed packages do not work together: {found[-1]}"
    hint = f"install compatible versions; {sys.executable} -m pip check lists the packages that conflict"
    return Problem(kind="environment", message=message, hint=hint)


# A process that was killed leaves no message. What remains is its status from os.wait and what the kernel counts:
#
#   status       also                                             cause
#   SIGKILL, -   the kernel has killed processes meanwhile         too little memory
#   any          the output's end reports too little memory        too little memory
#   exit code    no result                                        the script ended itself
#   SIGTERM ...                                                   something outside killed it, e.g. a job's limit
#   others       faulthandler's stack in the output               a crash in native code
def why_ended(status: int | None, output: str = "", *, peak_bytes: int = 0, ran_short: bool = False) -> Problem:
    """Return the problem that explains why a process ended without a result.

    `status`: from os.wait; None if the process's parent was killed, too. `peak_bytes`: its peak of resident memory.
    `ran_short`: whether the kernel has killed processes for lack of memory meanwhile.
    """
    number = -1 if status is None else status & 0x7F  # os.WTERMSIG
    if (number in (-1, signal.SIGKILL) and ran_short) or is_about_memory(output):
        return out_of_memory(peak_bytes)
    if number == 0:
        message = f"the simulated process ended with exit code {(status or 0) >> 8} and without a result"
        return with_output(Problem(kind=EXITED, message=message), output)
    if number in (-1, *_FROM_OUTSIDE):
        message = f"the simulated process was killed{f' with {signal.Signals(number).name}' if number > 0 else ''}"
        hint = "something outside of zerofit killed it, e.g. a limit of the job; run the command again"
        return Problem(kind=KILLED, message=message, hint=hint)
    return _crash(signal.Signals(number).name, output)


def _crash(name: str, output: str) -> Problem:
    said, _, stacks = output.partition("Fatal Python error")
    main = stacks.rpartition("Thread ")[2] or stacks  # the last thread is the script's
    frames = _FRAME.findall(stacks.partition("Current thread")[2].partition("\n\n")[0]) or _FRAME.findall(main)
    inner = next((f" in {shown_path(file)}:{line}" for file, line in frames), "")
    own = next((f"{file}:{line}" for file, line in _FRAME.findall(main) if not any(w in file for w in _LIBRARY)), "")
    reason = next(iter(last_lines(said, 1)), "")
    message = f"zerofit cannot simulate this: the simulated process crashed with {name}{inner}" + (
        f" ({reason})" if reason else ""
    )
    return Problem(kind=CRASHED, message=message, hint="this is a bug in zerofit: please report it", where=own)


def shown_path(file: str) -> str:
    """Return a file's path without the part before its package.

    If the file is in no package, return its name.
    """
    return file.rpartition("/site-packages/")[2] if "/site-packages/" in file else Path(file).name


def with_output(problem: Problem, output: str) -> Problem:
    """Return a problem with the last lines of the script's output."""
    lines = [line for line in last_lines(output, LINES) if line.strip() not in problem.message]
    if not lines:
        return problem
    return replace(problem, message="\n".join([f"{problem.message}; its last output:", *(f"  {one}" for one in lines)]))


def first_lines(error: BaseException) -> str:
    """Return the first lines of an exception's message, joined to one line."""
    return "; ".join(line.strip() for line in str(error).strip().splitlines()[:ERROR_LINES])


def last_lines(text: str, count: int) -> list[str]:
    """Return the last lines of an output.

    If a progress bar has overwritten a line, its final text counts.
    """
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line][-count:]
