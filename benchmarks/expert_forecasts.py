"""How far plan's memory of spread experts is from what `zerofit simulate` says, on GPUs of the catalog.

python benchmarks/expert_forecasts.py [--cases WORDS] [--out FILE]

Each layout is forecast, and its rank that needs most is simulated (of a pipeline one a stage), every layer of it. A
device's size decides nothing here: it is set so that all of them fit. Exit code 1 where a figure misses its target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from zerofit.app.planning.profiles import ProfileRequest, trace
from zerofit.app.simulation.runs import simulate
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.persistent import overlaps
from zerofit.plan.space import stage3_sizes
from zerofit.plan.timeline import timeline
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import find_device
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import versions
from zerofit.spec.model_facts import bucket_elements
from zerofit.spec.overhead import blas_workspace_bytes
from zerofit.spec.run import Run

KIND = "h100-80gb"
MEDIAN, MOST = 0.02, 0.05


class Case(NamedTuple):
    """A layout of a published model with fewer layers."""

    model: str
    layers: int
    seq_len: int
    nodes: int
    ep: int
    micro: int
    accumulation: int
    checkpointing: bool
    pp: int = 1  # at stage 1 alone


CASES = {
    "mixtral, checkpointing": Case("mixtral-8x7b", 4, 4096, 2, 8, 1, 1, True),
    "deepseek-v2, one copy": Case("deepseek-v2-lite", 5, 4096, 2, 16, 1, 1, False),
    "deepseek-v2, checkpointing": Case("deepseek-v2-lite", 6, 4096, 4, 4, 2, 2, True),
    "qwen3-moe": Case("qwen3-30b-a3b", 6, 2048, 4, 8, 2, 2, False),
    "mixtral": Case("mixtral-8x7b", 3, 4096, 1, 4, 1, 2, False),
    "mixtral, two stages": Case("mixtral-8x7b", 4, 4096, 2, 4, 1, 4, False, 2),
    "qwen3-moe, four stages, checkpointing": Case("qwen3-30b-a3b", 8, 2048, 4, 8, 2, 4, True, 4),
    "deepseek-v2, two stages": Case("deepseek-v2-lite", 6, 4096, 2, 8, 1, 2, False, 2),
}


def main() -> int:
    """0, or 1 where a figure misses its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--stages", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for stage in asked.stages:
        for name in (name for name in asked.cases if stage == 1 or CASES[name].pp == 1):
            rows.append(compared(name, CASES[name], stage))
            print(json.dumps(rows[-1]), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(summary(rows), indent=1) + "\n")
    errors = summary(rows)
    return int(errors["median"] > MEDIAN or errors["most"] > MOST)


def compared(name: str, case: Case, stage: int) -> dict[str, Any]:
    """Forecast one layout, and simulate the rank that needs most by it."""
    args: dict[str, object] = {"num_hidden_layers": case.layers}
    ranks = 8 * case.nodes
    wanted = ProfileRequest(
        model=case.model,
        precision="bf16",
        device="cuda",
        seq_len=case.seq_len,
        model_args=args,
        checkpointings=(case.checkpointing,),
        degrees=(Degrees(), Degrees(ep=case.ep)),
    )
    profile = trace(wanted, Reporter())
    sizes = stage3_sizes(profile)
    layout = PlannedLayout(
        zero_stage=stage,
        micro_batch=case.micro,
        accumulation=case.accumulation,
        dp=ranks // case.pp,
        pp=case.pp,
        ep=case.ep,
        checkpointing=case.checkpointing,
        bucket=bucket_elements(profile.trained),
        prefetch=sizes.prefetch if stage == 3 else 0,
        persistence=sizes.persistence if stage == 3 else 0,
    )
    planned = Forecaster(profile, "cuda", blas_workspace_bytes(find_device(KIND))).memory(layout).peak_bytes
    rank = 0 if stage == 3 else None  # simulate's own choice
    if stage < 3 and case.pp == 1:
        kept = overlaps(timeline(profile, layout.setting), ranks, int)
        rank = kept.index(max(kept))
    run = Run(
        model=case.model,
        model_args=args,
        seq_len=case.seq_len,
        ranks=ranks,
        pipeline=case.pp,
        expert_parallel=case.ep,
        micro_batch=case.micro,
        gradient_accumulation_steps=case.accumulation,
        activation_checkpointing=case.checkpointing,
        precision="bf16",
        ds_config=f"zero{stage}",
    )
    started = time.monotonic()
    found = simulate(run, Cluster(KIND, gpus=8, nodes=case.nodes, device_memory=2**40), rank=rank, exact=True)
    return {
        "case": f"{name}, ZeRO {stage}",
        **case._asdict(),
        "rank": found.rank,
        "simulated_bytes": found.peak_bytes,
        "planned_bytes": planned,
        "error": planned / found.peak_bytes - 1,
        "seconds": round(time.monotonic() - started),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all figures, and how far off they are."""
    errors = [abs(row["error"]) for row in rows]
    figures = {"median": statistics.median(errors), "most": max(errors), "layouts": len(rows)}
    return {"date": datetime.date.today().isoformat(), "versions": versions(), **figures, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
