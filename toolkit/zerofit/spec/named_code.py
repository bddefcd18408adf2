"""Decide whether code that a file names (package.module:callable) may be called.

No other module decides this. Trust depends on the file that a name comes from. Names in flags, Python arguments and
the user's run.yaml are trusted. Files that zerofit writes (run folders, checkpoints, exported models, profiles) may
come from somebody else: names in them need --trust-model-code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerofit.spec.errors import Problem, UserError

FLAG = "--trust-model-code"
RUN_FILE = "run.json"  # in run folders
LAYER_PACKAGES = {"torch", "torchvision", "transformers", "diffusers", "peft", "bitsandbytes", "deepspeed", "zerofit"}


def names_callable(name: str) -> bool:
    """Return whether a name has the form package.module:callable."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), attribute))


def in_run_folder(file: Path) -> bool:
    """Return whether a run file is named run.json, or is inside a run folder."""
    # A link can hide a run folder: one outside may lead to a file in it, or one inside to a file elsewhere.
    for path in (Path(os.path.abspath(file)), file.resolve()):
        # the name is enough, since an attacker could leave out the folder's other files
        if path.name == RUN_FILE:
            return True
        if any((folder / RUN_FILE).is_file() and (folder / "plan.json").is_file() for folder in path.parents):
            return True
    return False


def refuse_foreign_code(
    file: Path,
    trusted: bool,
    *,
    model: str = "",
    model_args: Mapping[str, object] | None = None,
    callbacks: Sequence[str] = (),
) -> None:
    """Raise UserError "untrusted-model" or "untrusted-callback" if `file` names Python code.

    A callback always names code. A model may also be a preset, a file or a folder. If the file is `trusted`, its
    code is allowed.
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


def unrelated_modules(config: Mapping[str, object], model: str) -> list[Problem]:
    """Return a problem for each class that DeepSpeed would import from an unrelated package.

    DeepSpeed imports the classes in `lower_precision_safe_modules` (runtime/torch_autocast.py,
    init_autocast_params). Related packages are LAYER_PACKAGES and the package of `model`.
    """
    autocast = config.get("torch_autocast")
    names = autocast.get("lower_precision_safe_modules") if isinstance(autocast, Mapping) else None
    own = {model.partition(":")[0].partition(".")[0]} if names_callable(model) else set[str]()
    return [
        Problem(
            kind="unrelated-module",
            message=f"{name} would be imported, but {model} has no layers from that package",
            hint=f"use classes of {', '.join(sorted(LAYER_PACKAGES | own))}",
            where="torch_autocast.lower_precision_safe_modules",
        )
        for name in (names if isinstance(names, list) else ())
        if str(name).partition(".")[0] not in LAYER_PACKAGES | own
    ]


def _problem(file: Path, kind: str, name: str, arguments: str) -> Problem:
    module, _, attribute = name.partition(":")
    message = f"{file} names code to run: module {module}, call {attribute}({arguments})"
    hint = f"add {FLAG} if you trust that file and the module {module}, or give {name} yourself"
    return Problem(kind=kind, message=message, hint=hint, where=str(file))
