"""What `zerofit plan` reckons for a job that exists already."""

from __future__ import annotations

from zerofit.models.catalog import source_of
from zerofit.plan.layout import LayoutMemory, PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.profile import TraceSetting, profile_model
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.profile import Savings


def planned(target: SimulationTarget) -> LayoutMemory:
    """The forecast for the rank that needs most, with the workspaces of products that the target's simulation has."""
    job, device = target.job, target.accelerator
    run, layout = job.run, job.layout
    setting = TraceSetting(
        job.precision, run.activation_checkpointing, layout.tp, layout.sp, layout.ep, Savings.of(run)
    )
    source, args = source_of(run), dict(run.model_args)
    profile = profile_model(source, job.facts.task, target.inputs, args, [setting], device)
    return Forecaster(profile, device, target.workspace_bytes).memory(PlannedLayout.of(job))
