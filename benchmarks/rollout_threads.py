"""Public threads about RL out of memory, and peaks of verl, beside `zerofit plan --method`; see README.md.

python benchmarks/rollout_threads.py [--output FILE.json]

`phase`: where the thread ran out of memory. `slug`: the finding that names its remedy. Exit code 1 if one is missed
that is not `excepted` (with the reason), or if a forecast of verl's allocated memory is wrong by more than MOST.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollouts import RolloutPlan, plan_rollouts
from zerofit.spec.cluster import Cluster

HERE = Path(__file__).parent
MOST = 0.02
NOT_ALLOCATED = ("process", "fragmentation")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = json.loads((HERE / "rollout_threads.json").read_text())
    rows = [compare(thread) for thread in cases["threads"]]
    peaks = [peak(run) for run in cases["measured"]]
    if options.output:
        options.output.write_text(json.dumps({"rows": rows, "measured": peaks}, indent=1) + "\n")
    return (
        0
        if all(row["agrees"] or "excepted" in row for row in rows) and all(abs(row["error"]) <= MOST for row in peaks)
        else 1
    )


def compare(thread: dict[str, Any]) -> dict[str, Any]:
    """Return plan's answer to a thread's settings, and whether it agrees with the thread."""
    plan = planned(thread, thread["method"], thread["rollout"])
    memory, slugs = plan.best.memory, [slug for slug, _ in plan.findings]
    short = [phase.name for phase in memory.phases if phase.bytes > memory.fit.device_available_bytes]
    agrees = plan.best.fits is thread["fits"] and (thread["fits"] or thread["phase"] in short)
    agrees = agrees and thread.get("slug", "phase") in (*slugs, *(["phase"] if thread["fits"] else []))
    found = "as found" if agrees else "excepted" if "excepted" in thread else "OTHERWISE"
    print(f"{found:9}  {thread['thread']:32} {short} {slugs}", flush=True)
    answer = {"fits": plan.best.fits, "short": short, "slugs": slugs, "highest_bytes": memory.highest.bytes}
    reason = {"excepted": thread["excepted"]} if "excepted" in thread else {}
    return {"thread": thread["thread"], **answer, "agrees": agrees, **reason}


def peak(run: dict[str, Any]) -> dict[str, Any]:
    """Return plan's allocated memory beside a published figure of verl."""
    memory = planned(run, "grpo", {"trainer": "verl", **run["rollout"]}).best.memory
    phases = {phase.name: phase.parts for phase in memory.phases}
    parts = phases.get(run["of"]) or {run["of"]: phases["train"][run["of"]]}
    own = [size for kind, size in parts.items() if not kind.startswith("vLLM") and kind not in NOT_ALLOCATED]
    forecast = sum(own) / 2**30
    error = forecast / run["allocated_gib"] - 1
    print(f"{error:+7.1%}  {forecast:6.2f} {run['allocated_gib']:6.2f} GiB  {run['of']}: {run['source']}", flush=True)
    figures = {"allocated_gib": run["allocated_gib"], "forecast_gib": round(forecast, 3), "error": round(error, 4)}
    return {"source": run["source"], "of": run["of"], **figures}


def planned(case: dict[str, Any], method: str, rollout: dict[str, Any]) -> RolloutPlan:
    """Return the plan of a case's settings."""
    pins: Any = {"precision": "bf16", "activation_checkpointing": True, "offload": "none", **case["run"]}
    cluster = Cluster(case["gpu"], gpus=case["gpus"])
    return plan_rollouts(method, PlanningRequest(model=case["model"], pins=pins), cluster, rollout)


if __name__ == "__main__":
    sys.exit(main())
