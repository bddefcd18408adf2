"""What `zerofit tune` has measured, as a correction of a plan's step times."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.plan.layout import PlannedLayout
from zerofit.spec.errors import Problem, UserError
from zerofit.tune.step_time_model import StepTimeModel, forecast_errors
from zerofit.tune.trial import Candidate

FLAG = "--from"
FILE = "trials.json"  # in the folder that a tuning has written


@dataclass(frozen=True)
class TunedLayouts:
    """Measured configurations of one model on one kind of device."""

    path: Path
    model: str
    device: str
    measured: tuple[tuple[Candidate, float], ...]  # with their step times in seconds

    def correct(self, layout: PlannedLayout, step_s: float) -> float:
        """Return the step time of a layout, forecast as `step_s`, as the trials have it."""
        return math.exp(self._learned.expected(Candidate(layout=layout, forecast_step_s=step_s, peak_bytes=0))[0])

    @cached_property
    def _learned(self) -> StepTimeModel:
        return StepTimeModel(self.measured)

    def to_dict(self) -> dict[str, Any]:
        """Return how far forecasts were from what was measured, as `zerofit plan --json` prints it."""
        errors = forecast_errors(self.measured)
        shares = {
            name: {"median": pair[0], "most": pair[1]} if pair else None for name, pair in errors._asdict().items()
        }
        return {"path": str(self.path), "model": self.model, "trials": len(self.measured), "errors": shares}


def read_tuned(path: Path) -> TunedLayouts:
    """Read the trials of a tuning, from its folder or its trials.json. Raises UserError."""
    file = path / FILE if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        pairs = tuple((_candidate(row), float(row["measured_step_s"])) for row in found["measured"])
        model, device = str(found["model"]), str(found["device"])
    except OSError as error:
        raise _problem(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _problem(f"{file} is not a tuning: {type(error).__name__}: {error}") from None
    if not pairs:
        raise _problem(f"{file} holds no trial that was measured")
    return TunedLayouts(file, model, device, pairs)


def refuse_other_device(tuned: TunedLayouts, kind: str) -> None:
    """Raise a UserError where the plan is for another kind of device than was measured."""
    if kind != tuned.device:
        message = f"{tuned.path} was measured on {tuned.device}, and the plan is for {kind}"
        hint = f"leave {FLAG} out, or take --gpu {tuned.device}"
        raise UserError(Problem(kind="tuned-elsewhere", message=message, hint=hint, where=FLAG))


def _candidate(row: dict[str, Any]) -> Candidate:
    names = ("compiled", "forecast_step_s", "peak_bytes")
    return Candidate(layout=PlannedLayout(**row["choice"]), **{name: row[name] for name in names})


def _problem(message: str) -> UserError:
    hint = "name the folder that `zerofit tune --output` has written"
    return UserError(Problem(kind="tuned", message=message, hint=hint, where=FLAG))
