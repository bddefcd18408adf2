"""The trace of a planned step, as `zerofit plan --trace` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.rates import Rates
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.step_trace import layer_memory, step_trace
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_text
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.profile import Profile

FLAG = "--trace"


def refuse_place(path: Path) -> None:
    """Raise a UserError if a trace cannot be written to this path."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        hint = "name a file in an existing folder"
        raise UserError(Problem(kind="bad-value", message=f"cannot write {path}", hint=hint, where=FLAG))


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace. Raises UserError if it cannot be written."""
    try:
        write_text(path, json.dumps(trace, separators=(",", ":")) + "\n")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise UserError(Problem(kind="unwritable", message=message, where=FLAG)) from None


def trace_of_layout(
    profile: Profile, cluster: Cluster, rates: Rates, layout: PlannedLayout, step_s: float
) -> dict[str, Any]:
    """Return the trace of a planned step, scaled to `step_s`: the first rank of each pipeline stage."""
    timer = Timer(profile, cluster, rates)
    timeline = step_timeline(profile, timer, layout)
    timeline = timeline.scaled(step_s / timeline.step_s)
    forecaster = Forecaster(profile, cluster.accelerator, blas_workspace_bytes(cluster.device.kind))
    ranks = {stage: stage * (layout.world_size // layout.pp) for stage in range(layout.pp)}
    memory = [sample for stage in ranks for sample in layer_memory(timeline, stage, forecaster.along(layout, stage))]
    return step_trace(timeline, memory, ranks, about(profile, cluster, layout))


def about(profile: Profile, cluster: Cluster, layout: PlannedLayout) -> dict[str, Any]:
    """Return the description of a traced step: the layout, the model and the machine."""
    machine = {"gpu": cluster.device.kind, "gpus": cluster.gpus, "nodes": cluster.nodes}
    return {"forecast": str(layout), "model": profile.model, **machine, "layout": layout.to_dict()}
