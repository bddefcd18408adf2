"""Companion files of a DeepSpeed JSON: arguments of a training and Accelerate's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerofit.check.asked import asked_of
from zerofit.check.companion import ACCELERATE_JSON, Companion, of_mapping, read_companion
from zerofit.check.scan import SyntaxFault
from zerofit.check.subject import Asked
from zerofit.config.ds_json import read_text
from zerofit.spec.errors import Problem, UserError


def read(given: str | Path | Mapping[str, Any], *, accelerate: bool) -> Companion:
    """Read a companion file or values. Raises UserError with line and column if it does not parse."""
    if isinstance(given, Mapping):
        return of_mapping(given, accelerate=accelerate)
    where = "--accelerate-config" if accelerate else "--training-args"
    try:
        return read_companion(str(given), read_text(Path(given))[0], accelerate=accelerate)
    except SyntaxFault as fault:
        message = f"{given} has a syntax error at line {fault.line}, column {fault.column}: {fault.message}"
        problem = Problem(kind="syntax", message=message, where=f"{given}:{fault.line}:{fault.column}")
        raise UserError(problem) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {given}: {error}"
        raise UserError(Problem(kind="unreadable", message=message, where=where)) from None


def named_config(companions: Sequence[Companion]) -> tuple[str, str] | None:
    """Return the JSON that a companion names, relative to this folder or that file, and the line that names it."""
    for companion in companions:
        named = companion.config_file
        if named is not None:
            beside = Path(companion.file).parent / named
            where = companion.place(ACCELERATE_JSON if companion.kind == "accelerate" else "deepspeed")
            return (str(beside) if beside.exists() and not Path(named).exists() else named), where
    return None


def asked_beside(companions: Sequence[Companion], file: str, ranks: int | None) -> Iterator[Asked]:
    """Yield the values that companions request for keys of the JSON, except one whose own keys are the JSON."""
    for companion in companions:
        if companion.file != file:
            yield from asked_of(companion, ranks)
