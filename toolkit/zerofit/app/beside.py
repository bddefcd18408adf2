"""Files beside a DeepSpeed JSON: arguments of a training and Accelerate's configuration, found and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerofit.check.asked import asked_of
from zerofit.check.companion import Companion, of_mapping, read_companion
from zerofit.check.scan import SyntaxFault
from zerofit.check.subject import Asked
from zerofit.config.ds_json import read_text
from zerofit.spec.errors import Problem, UserError


def read(given: str | Path | Mapping[str, Any], *, accelerate: bool) -> Companion:
    """Read a file beside the JSON, or take its values. Raises UserError with line and column of what does not parse."""
    if isinstance(given, Mapping):
        return of_mapping(given, accelerate=accelerate)
    where = "--accelerate-config" if accelerate else "--training-args"
    try:
        return read_companion(str(given), read_text(Path(given))[0], accelerate=accelerate)
    except SyntaxFault as fault:
        message = f"{given} does not parse at line {fault.line}, column {fault.column}: {fault.message}"
        problem = Problem(kind="syntax", message=message, where=f"{given}:{fault.line}:{fault.column}")
        raise UserError(problem) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {given}: {error}"
        raise UserError(Problem(kind="unreadable", message=message, where=where)) from None


def named_config(companions: Sequence[Companion]) -> Path | None:
    """Return the JSON that files name: from here, as the program would read it, else beside the file that names it."""
    for companion in companions:
        if companion.config_file is not None:
            path, beside = Path(companion.config_file), Path(companion.file).parent / companion.config_file
            return beside if beside.exists() and not path.exists() else path
    return None


def asked_beside(companions: Sequence[Companion], file: str, ranks: int | None) -> Iterator[Asked]:
    """Yield what files beside the JSON ask of it; of one whose own keys stand for the JSON, nothing."""
    for companion in companions:
        if companion.file != file:
            yield from asked_of(companion, ranks)
