"""Public threads about RL out of memory beside what `zerofit plan --method` says of their settings; see README.md.

python benchmarks/rollout_threads.py [--output FILE.json]

`phase`: where the thread ran out of memory. `slug`: the finding that names its remedy. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollouts import plan_rollouts
from zerofit.spec.cluster import Cluster

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [compare(thread) for thread in json.loads((HERE / "rollout_threads.json").read_text())["threads"]]
    if options.output:
        options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in rows) else 1


def compare(thread: dict[str, Any]) -> dict[str, Any]:
    """Return plan's answer to a thread's settings, and whether it agrees with the thread."""
    pins: Any = {"precision": "bf16", "activation_checkpointing": True, "offload": "none", **thread["run"]}
    cluster = Cluster(thread["gpu"], gpus=thread["gpus"])
    plan = plan_rollouts(
        thread["method"], PlanningRequest(model=thread["model"], pins=pins), cluster, thread["rollout"]
    )
    memory, slugs = plan.best.memory, [slug for slug, _ in plan.findings]
    short = [phase.name for phase in memory.phases if phase.bytes > memory.fit.device_available_bytes]
    agrees = plan.best.fits is thread["fits"] and (thread["fits"] or thread["phase"] in short)
    agrees = agrees and thread.get("slug", "phase") in (*slugs, *(["phase"] if thread["fits"] else []))
    print(f"{'as found' if agrees else 'OTHERWISE':9}  {thread['thread']:32} {short} {slugs}", flush=True)
    answer = {"fits": plan.best.fits, "short": short, "slugs": slugs, "highest_bytes": memory.highest.bytes}
    return {"thread": thread["thread"], **answer, "agrees": agrees}


if __name__ == "__main__":
    sys.exit(main())
