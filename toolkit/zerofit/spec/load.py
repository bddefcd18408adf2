"""Strict loading of a run: run.yaml or run.json, overridden by flags, with every problem found at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.run import Run


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as asked, and where each explicit value stands (for messages that name both places)."""

    run: Run
    places: Mapping[str, str]  # field -> "--micro-batch" or "run.yaml:3"

    @classmethod
    def of(cls, run: Run | RunRequest) -> RunRequest:
        """Return the request of a run that was made in Python: a field that was set stands at its own name.

        >>> RunRequest.of(Run(model="mlp", micro_batch=4)).place("micro_batch")
        'micro_batch'
        """
        return (
            run if isinstance(run, RunRequest) else cls(run=run, places={name: name for name in run.model_fields_set})
        )

    def place(self, field: str) -> str:
        """Where the user set this field, or the flag that would set it."""
        return self.places.get(field, flag(field))


def flag(field: str) -> str:
    """The command line's word for a field of the run."""
    return "--" + field.replace("_", "-") if field != "model" else "MODEL"


def load_run(file: Path | None, flags: Mapping[str, Any]) -> RunRequest:
    """The run that a file and flags ask for; a flag overrides the file.

    Raises UserError with all unknown keys (nearest names offered) and all bad values.
    """
    values, places = _read_file(file) if file else ({}, {})
    problems = Problems()
    for key in [k for k in values if k not in Run.model_fields]:
        hint = nearest(str(key), Run.model_fields)
        problems.add("unknown-key", f"unknown key {key!r}", hint, places.get(str(key), str(file)))
        del values[key]
    values |= flags
    places = {k: p for k, p in places.items() if values.get(k) is not None} | {k: flag(k) for k in flags}
    try:
        run = Run(**values)
    except ValidationError as error:
        problems.extend(_from_pydantic(error, places))
    problems.raise_if_any()
    return RunRequest(run=run, places={k: p for k, p in places.items() if k in Run.model_fields})


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Keys of a YAML (or JSON) mapping and the place of each."""
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise UserError(
            Problem(kind="syntax", message=f"{file} does not parse: {error.problem}", where=where)
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(Problem(kind="unreadable", message=f"cannot read {file}: {error}", where=str(file))) from None
    if not isinstance(values, dict):
        hint = "write it as lines of `key: value`; `zerofit train --help` lists the keys"
        raise UserError(
            Problem(
                kind="syntax",
                message=f"{file} holds no mapping of keys to values",
                hint=hint,
                where=str(file),
            )
        )
    return values, {str(k.value): f"{file}:{k.start_mark.line + 1}" for k, _ in node.value}


def _from_pydantic(error: ValidationError, places: Mapping[str, str]) -> list[Problem]:
    problems = []
    for entry in error.errors():
        field = str(entry["loc"][0])
        message = f"{field}: got {entry['input']!r}; {entry['msg'][0].lower()}{entry['msg'][1:]}"
        hint = f"{flag(field)} is: {Run.model_fields[field].description}"
        problems.append(Problem(kind="bad-value", message=message, hint=hint, where=places.get(field, flag(field))))
    return problems
