"""Code that files name (package.module:callable): the one decision whether a name may be imported and called.

Trust belongs to the file that a name comes from, not to the command that reads it. The user's own word are a flag, an
argument in Python, and a run file (run.yaml) that the user names. What zerofit itself has written (run folders,
checkpoints, exported models, profiles) may come from somebody else: the names in it need --trust-model-code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerofit.spec.errors import Problem, UserError

FLAG = "--trust-model-code"
RUN_FILE = "run.json"  # as run folders have it


def names_callable(name: str) -> bool:
    """Return whether a name has the form package.module:callable."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), attribute))


def in_run_folder(file: Path) -> bool:
    """Return whether a run file belongs to a run folder: it is called run.json, or lies in a folder of one.

    The name alone counts, since whoever copies a folder together decides what else lies in it. Links are followed.
    """
    places = (Path(os.path.abspath(file)), file.resolve())
    return any(
        place.name == RUN_FILE
        or any((folder / RUN_FILE).is_file() and (folder / "plan.json").is_file() for folder in place.parents)
        for place in places
    )


def refuse_foreign_code(
    file: Path,
    trusted: bool,
    *,
    model: str = "",
    model_args: Mapping[str, Any] | None = None,
    callbacks: Sequence[str] = (),
) -> None:
    """Raise UserError "untrusted-model" or "untrusted-callback" for each name of code in `file`, unless `trusted`.

    Every name of a callback is one of code; a model's may also be that of a preset, a file or a folder.
    """
    if trusted:
        return
    problems = []
    if names_callable(model):
        arguments = ", ".join(f"{name}={value!r}" for name, value in (model_args or {}).items())
        problems.append(_problem(file, "untrusted-model", model, arguments))
    problems += [_problem(file, "untrusted-callback", name, "") for name in callbacks]
    if problems:
        raise UserError(*problems)


def _problem(file: Path, kind: str, name: str, arguments: str) -> Problem:
    module, _, attribute = name.partition(":")
    message = f"{file} asks to import the module {module} and to call {attribute}({arguments}), which runs its code"
    hint = f"{FLAG}, if you know who wrote that file and the module {module}; or name {name} yourself"
    return Problem(kind=kind, message=message, hint=hint, where=str(file))
