"""Forecasts for GPUs that this machine does not have: hours by `zerofit plan`."""

from __future__ import annotations

import shlex
from typing import Any

from zerofit.app.documents.bench import Bench
from zerofit.app.planning.planner import plan
from zerofit.spec.cluster import Cluster


def planned(bench: Bench, name: str, model: str, gpu: str, gpus: int, nodes: int = 1, **options: Any) -> dict[str, Any]:
    """Return the best layout of `zerofit plan`, whether it fits, and the command that prints it."""

    def forecast() -> dict[str, Any]:
        found = plan(model, Cluster(gpu, gpus=gpus, nodes=nodes), top=1, **options)
        best = (found.layouts or found.misfits)[0]
        hours = best.outlook.hours if best.outlook else None
        figures = {"layout": str(best.layout), "fits": bool(found.layouts), "peak_bytes": best.peak_bytes}
        return {**figures, "step_s": best.step_s, "samples_per_s": best.samples_per_s, "hours": hours}

    words = ["zerofit", "plan", model, "--gpu", gpu, "--gpus", str(gpus), *(["--nodes", str(nodes)] * (nodes > 1))]
    for option, value in options.items():
        words += ["--" + {"image": "input"}.get(option, option).replace("_", "-"), str(value)]
    return {**bench.keep(name, forecast), "command": shlex.join(words)}
