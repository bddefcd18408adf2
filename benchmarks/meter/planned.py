"""What `zerofit plan` reckons for a job that exists already."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerofit.models.catalog import find
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import forecast
from zerofit.simulate.profile import TraceSetting, profile_model
from zerofit.simulate.record import SimulationTarget


def planned(target: SimulationTarget) -> dict[str, Any]:
    """The forecast for the rank that needs most, as plain JSON."""
    job, device = target.job, target.accelerator
    setting = TraceSetting(job.precision, job.run.activation_checkpointing, job.layout.tp, job.layout.sp)
    source, args = find(job.run.model), dict(job.run.model_args)
    profile = profile_model(source, job.facts.task, target.inputs, args, [setting], device)
    return asdict(forecast(profile, PlannedLayout.of(job), device))
