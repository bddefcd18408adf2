"""Answers and errors of commands: as lines or as JSON (--json), and with an exit code.

The exit codes are 0, 1, 2, 3, 70, 75 and 130. With --json, the last line is one JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import click

from zerofit.cli.terminal import style
from zerofit.spec.errors import DoesNotFit, ModelError, Problem, RunFailed, Stopped, UserError
from zerofit.spec.extras import missing_extra
from zerofit.spec.files import cache_root
from zerofit.spec.process import stop_requests

BAD_INPUT, INTERNAL, STOPPED = 2, 70, 130  # in addition to those in zerofit.spec.errors
MAX_PLACES = 3  # further places of the same problem that are named


class Result(Protocol):
    """The result of a command."""

    def to_dict(self) -> Mapping[str, object]:
        """Return the object that `--json` prints."""
        ...


R = TypeVar("R", bound="Result | Mapping[str, object]")


# Every command ends here: its function returns a result, printed as one line of JSON or lines for people, or raises an
# error, which becomes messages and an exit code. Scripts rely on both, so no command exits in another way.
def answer(work: Callable[[], R], as_json: bool, show: Callable[[R], None], interrupted: str = "") -> R:
    """Call `work`, the function of a command, and print the result.

    Errors end the process with their exit code.

    `interrupted` is the hint to print after Ctrl-C, for commands without checkpoints.
    """
    with _stoppable():
        try:
            result = work()
        except (UserError, DoesNotFit, ModelError, RunFailed, Stopped) as error:
            fail(problems_of(error), error.exit_code, as_json)
        except KeyboardInterrupt as request:
            # The function raises KeyboardInterrupt with the run folder, if there is one.
            where = str(request)
            saved = where and any((Path(where) / "checkpoints").glob("step-*"))
            hint = "run the same command again to resume from the newest checkpoint" if saved else interrupted
            fail([Problem(kind="interrupted", message="stopped on request", hint=hint, where=where)], STOPPED, as_json)
    if as_json:
        print(json.dumps(result if isinstance(result, Mapping) else result.to_dict()), flush=True)
    else:
        show(result)
    return result


def problems_of(error: Exception) -> list[Problem]:
    """Return the problems that an error reports to the user; [] for a bug in zerofit."""
    if isinstance(error, (UserError, DoesNotFit)):
        return list(error.problems)
    if isinstance(error, ModelError):
        return [Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")]
    if isinstance(error, (RunFailed, Stopped)):
        return [error.problem]
    missing = missing_extra(error)
    return [missing] if missing else []


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within the block, SIGTERM, SIGUSR1 and a closed terminal have the effect of Ctrl-C."""
    # default_int_handler raises KeyboardInterrupt in the main thread, so that all blocks with cleanup run.
    former = {number: signal.signal(number, signal.default_int_handler) for number in stop_requests()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def fail_internally(error: Exception, as_json: bool) -> NoReturn:
    """Exit with code 70 for a bug in zerofit, and print the path of a file with the traceback.

    Exit with code 2 (bad input) if a package of an extra is missing, or if the system refuses a path.
    """
    if missing := missing_extra(error):
        fail([missing], BAD_INPUT, as_json)
    if why := _path_error(error):
        hint = "check the permissions of this path and the free disk space, or use another path"
        if str(cache_root()) in why:
            hint += "; ZEROFIT_CACHE=FOLDER sets another cache"
        fail([Problem(kind="path", message=why, hint=hint)], BAD_INPUT, as_json)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"cannot write the answer: {error.strerror}"
        hint = "free space on the disk to which standard output goes"
        fail([Problem(kind="path", message=message, hint=hint)], BAD_INPUT, as_json=False)
    message = f"zerofit failed: {type(error).__name__}: {error}"
    hint = "this is a bug in zerofit; please report it with the traceback in that file"
    problem = Problem(kind="internal", message=message, hint=hint, where=str(_write_traceback(error)))
    fail([problem], INTERNAL, as_json)


# errors due to a path, its permissions or its disk; missing files are handled where they are opened
REFUSED = ("ENAMETOOLONG", "ENOTDIR", "EISDIR", "ELOOP", "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG")


def _path_error(error: Exception) -> str:
    """Return the system's message if the system refuses a path, else ""."""
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in REFUSED and error.filename is not None:
        return f"cannot use {os.fsdecode(error.filename)}: {error.strerror}"
    return "a path has a NUL byte" if isinstance(error, ValueError) and "embedded null byte" in str(error) else ""


def _write_traceback(error: Exception) -> Path:
    """Write the command line and the traceback into a file, and return its path."""
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = f"{' '.join(sys.argv)}\n\n" + "".join(traceback.format_exception(error))
    for folder in (cache_root() / "errors", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Only the owner may read the file, because arguments can be secrets (--env NAME=VALUE).
            with open(folder / name, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                file.write(text)
            return folder / name
        except OSError:
            continue
    # Neither folder can be written, for example because the disk is full.
    sys.stderr.write(text)
    return Path("(above)")


def fail(problems: list[Problem], code: int, as_json: bool) -> NoReturn:
    """Print problems to standard error, with --json also to standard output, and exit."""
    # Problems that differ only in their place, such as the lines of a file that lack the same field, are one message.
    for _, alike in groupby(problems, lambda p: (p.kind, p.hint, p.message.replace(p.where, ""))):
        problem, *others = alike
        # A requested stop is not an error.
        label = "" if code in (Stopped.exit_code, STOPPED) else f"{style('error', fg='red', bold=True)}: "
        click.echo(f"{label}{problem.message}", err=True)
        # A message often contains its place. The place is then not printed a second time.
        if problem.where not in problem.message:
            click.echo(f"   at: {problem.where}", err=True)
        if others and problem.where:
            unnamed = " and more" if len(others) > MAX_PLACES else ""
            click.echo(f" also: {', '.join(other.where for other in others[:MAX_PLACES])}{unnamed}", err=True)
        if problem.hint:
            click.echo(f"  try: {problem.hint}", err=True)
    # Programs read the last line as JSON, so an error must be an object, too, also before any result.
    if as_json:
        shown: dict[str, object] = {"error": problems[0].as_dict()}
        if len(problems) > 1:
            shown["errors"] = [p.as_dict() for p in problems]
        print(json.dumps(shown), flush=True)
    sys.exit(code)
