"""What `zerofit plan` reckons for a job that exists already."""

from __future__ import annotations

from zerofit.models.catalog import source_of
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.profile import Profile, Savings


def planned(target: SimulationTarget) -> LayoutMemory:
    """The forecast for the rank that needs most, with the workspaces of products that the target's simulation has."""
    forecaster = Forecaster(traced(target), target.accelerator, target.workspace_bytes)
    return forecaster.memory(PlannedLayout.of(target.job))


def traced(target: SimulationTarget) -> Profile:
    """Trace the target's model in the target's setting."""
    job = target.job
    run, layout = job.run, job.layout
    setting = TraceSetting(
        job.precision, run.activation_checkpointing, layout.tp, layout.sp, layout.ep, Savings.of(run)
    )
    source, args = source_of(run), dict(run.model_args)
    return profile_model(source, job.facts.task, target.inputs, args, [setting], target.accelerator)
