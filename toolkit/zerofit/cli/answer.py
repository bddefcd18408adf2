"""How every command answers: a last line of JSON if asked, errors in one form, exit codes 0, 2, 3, 75 and 130."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from zerofit.models.catalog import ModelError
from zerofit.spec.errors import Problem, RunFailed, Stopped, UserError

BAD_INPUT, FAILED, RUN_AGAIN, STOPPED = 2, 3, 75, 130
REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def answer(work: Callable[[], dict[str, Any]], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Do a command's work and print its answer; bad input and failed runs end the process with their exit codes."""
    with _stoppable():
        result = _done(work, as_json)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        show(result)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within it a request to stop (SIGTERM, SIGUSR1, a closed terminal) is answered as Ctrl-C is."""
    former = {number: signal.signal(number, signal.default_int_handler) for number in REQUESTS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _done(work: Callable[[], dict[str, Any]], as_json: bool) -> dict[str, Any]:
    """What the work gives; where it fails, the process ends here."""
    try:
        return work()
    except UserError as error:
        fail(list(error.problems), BAD_INPUT, as_json)
    except ModelError as error:
        fail([Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")], BAD_INPUT, as_json)
    except RunFailed as error:
        fail([error.problem], FAILED, as_json)
    except Stopped as stopped:
        fail([stopped.problem], RUN_AGAIN, as_json)
    except KeyboardInterrupt as request:
        where = str(request)
        hint = f"`zerofit plot {where}` shows how far it came" if where else ""
        fail([Problem(kind="interrupted", message="stopped on request", hint=hint, where=where)], STOPPED, as_json)


def fail(problems: list[Problem], code: int, as_json: bool) -> NoReturn:
    """Say what is wrong, on standard error for people and as the last line of standard output for scripts."""
    for problem in problems:
        click.echo(f"{click.style('error', fg='red', bold=True)}: {problem.message}", err=True)
        if problem.where:
            click.echo(f"   at: {problem.where}", err=True)
        if problem.hint:
            click.echo(f"  try: {problem.hint}", err=True)
    if as_json:
        shown: dict[str, Any] = {"error": problems[0].as_dict()}
        if len(problems) > 1:
            shown["errors"] = [p.as_dict() for p in problems]
        print(json.dumps(shown), flush=True)
    sys.exit(code)
