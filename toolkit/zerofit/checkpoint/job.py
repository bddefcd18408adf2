"""The job that a checkpoint belongs to, as its manifest keeps it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerofit.spec.run_folder import Job


def job_json(job: Job) -> dict[str, Any]:
    """What a job's ranks were given, as JSON: run, layout, batch, steps, facts, ds_config."""
    return {
        "run": job.run.model_dump(mode="json"),
        "layout": asdict(job.layout),
        "batch": asdict(job.batch),
        "steps": job.steps,
        "facts": asdict(job.facts),
        "ds_config": job.ds_config,
    }


# What of the DeepSpeed JSON decides which tensors its files hold, and how they are cut.
_STORAGE = ("zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "tensor_parallel")


def same_storage(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether DeepSpeed can load the files of the one job (as `job_json` gives it) into the engine of the other."""

    def storage(job: dict[str, Any]) -> tuple[Any, ...]:
        config = job["ds_config"]
        kind = config.get("optimizer", {}).get("type")
        return (job["layout"], job["run"]["precision"], kind, [config.get(key) for key in _STORAGE])

    measured = "time" in (old["run"]["pipeline_balance"], new["run"]["pipeline_balance"])  # bounds of stages may move
    return storage(old) == storage(new) and not (measured and new["layout"]["pp"] > 1)
