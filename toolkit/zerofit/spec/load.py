"""Strict loading of a run: run.yaml or run.json, overridden by flags, with every problem found at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run import Run, read_run_file


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
    """Return the run that a file and flags ask for; a flag overrides the file.

    Raises UserError with all unknown keys (nearest names offered) and all bad values.
    """
    values, places = read_run_file(file) if file else ({}, {})
    values |= flags
    places |= {k: flag(k) for k in flags}
    try:
        run = Run(**values)
    except UserError as error:
        raise UserError(*(_placed(problem, places) for problem in error.problems)) from None
    return RunRequest(run=run, places={k: p for k, p in places.items() if k in flags or values[k] is not None})


def _placed(problem: Problem, places: Mapping[str, str]) -> Problem:
    """Return a problem of `Run` as people see it who wrote a file or flags."""
    field = problem.where
    hint = f"{flag(field)} is: {problem.hint}" if field in Run.model_fields else problem.hint
    return replace(problem, hint=hint, where=places.get(field, flag(field)))
