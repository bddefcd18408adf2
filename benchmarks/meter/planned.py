"""What `zerofit plan` reckons for a job that exists already."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerofit.check.dotted import get
from zerofit.models.catalog import find
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import forecast
from zerofit.simulate.profile import TraceSetting, profile_model
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.run_folder import Job


def planned(target: SimulationTarget) -> dict[str, Any]:
    """The forecast for the rank that needs most, as plain JSON."""
    job, device = target.job, target.accelerator
    setting = TraceSetting(job.precision, job.run.activation_checkpointing, job.layout.tp, job.layout.sp)
    source, args = find(job.run.model), dict(job.run.model_args)
    profile = profile_model(source, job.facts.task, target.inputs, args, [setting], device)
    return asdict(forecast(profile, layout_of(job), device))


def layout_of(job: Job) -> PlannedLayout:
    """The layout that the job has, as plan would list it."""
    zero, layout = job.ds_config.get("zero_optimization", {}), job.layout
    sizes = {
        "bucket": "reduce_bucket_size",
        "prefetch": "stage3_prefetch_bucket_size",
        "persistence": "stage3_param_persistence_threshold",
        "overlap": "overlap_comm",
    }
    return PlannedLayout(
        zero_stage=layout.zero_stage,
        micro_batch=job.batch.micro,
        accumulation=job.batch.accumulation,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        sp=layout.sp,
        precision=job.precision,
        checkpointing=job.run.activation_checkpointing,
        offload_optimizer=get(zero, "offload_optimizer.device", "none"),
        offload_param=get(zero, "offload_param.device", "none"),
        **{field: zero[key] for field, key in sizes.items() if key in zero},
    )
