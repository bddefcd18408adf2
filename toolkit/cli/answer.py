"""How every command answers: a last line of JSON if asked, errors in one form, exit codes 0, 2, 3 and 130."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from zerofit.models.catalog import ModelError
from zerofit.spec.errors import Problem, RunFailed, UserError

BAD_INPUT, FAILED, STOPPED = 2, 3, 130


def answer(work: Callable[[], dict[str, Any]], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Do a command's work and print its answer; bad input and failed runs end the process with their exit codes."""
    try:
        result = work()
    except UserError as error:
        fail(list(error.problems), BAD_INPUT, as_json)
    except ModelError as error:
        fail([Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")], BAD_INPUT, as_json)
    except RunFailed as error:
        fail([error.problem], FAILED, as_json)
    except KeyboardInterrupt as request:
        where = str(request)
        hint = f"`zerofit plot {where}` shows how far it came" if where else ""
        fail([Problem(kind="interrupted", message="stopped on request", hint=hint, where=where)], STOPPED, as_json)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        show(result)


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
