"""How much more than its allocated peak a run needs: the smallest device on which torch's allocator gets by.

Simulates Llama-3.1-8B on 8 GPUs in several layouts, replays every allocation on devices of decreasing size (giving back
cached segments as the allocator does), and prints the shares that `spec/overhead.py` keeps free for a plan. Beside them
stands what a plan counts for the largest blocks of a step, which it keeps free where they are more (`plan/fit.py`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.meter.planned import planned
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.simulate.forecast.run import SimulatedRank, simulate_ranks
from zerofit.simulate.memory.allocator import replay
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem
from zerofit.spec.run import Run, RunRequest

GIB = 2**30
STEP_BYTES = 64 * 2**20  # how closely the smallest device is looked for
GPUS, KIND = 8, "h200"
COMMON = {"model": "llama-3.1-8b", "precision": "bf16", "seq_len": 2048, "micro_batch": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"ds_config": "zero1"},
    "zero2, checkpointing": {"ds_config": "zero2", "activation_checkpointing": True},
    "zero3": {"ds_config": "zero3"},
    "zero3, checkpointing": {"ds_config": "zero3", "activation_checkpointing": True},
    "zero3, checkpointing, 2 x 2": {
        "ds_config": "zero3",
        "activation_checkpointing": True,
        "micro_batch": 2,
        "gradient_accumulation_steps": 2,
    },
    "zero1, checkpointing, 8 x 1": {"ds_config": "zero1", "activation_checkpointing": True, "micro_batch": 8},
    "zero2, checkpointing, 8 x 1": {"ds_config": "zero2", "activation_checkpointing": True, "micro_batch": 8},
    "zero3, checkpointing, 8 x 1": {"ds_config": "zero3", "activation_checkpointing": True, "micro_batch": 8},
    "zero3_offload, checkpointing": {"ds_config": "zero3_offload", "activation_checkpointing": True},
}


def main() -> None:
    """Print a row a layout, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    out = parser.parse_args().out
    cluster = Cluster(KIND, gpus=GPUS, host_memory=2**41)
    runs = [RunRequest.of(Run(**(COMMON | spec))) for spec in LAYOUTS.values()]
    targets = [prepare_simulation(run, cluster).target(0) for run in runs]
    found = simulate_ranks(targets, lambda text: print(text, end="\r", file=sys.stderr), exact=True)
    rows = [_row(name, one) for name, one in zip(LAYOUTS, found, strict=True)]
    for row in rows:
        print(f"{row['layout']:32} peak {row['peak_bytes'] / GIB:6.2f} GiB, needs +{row['needed_share']:.1%}, ", end="")
        print(f"largest blocks {row['blocks_share']:.1%}, reserves +{row['reserved_share']:.1%} where there is room")
    if out:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
        answer = {"date": datetime.date.today().isoformat(), "device": KIND, "gpus": GPUS, "versions": versions}
        out.write_text(json.dumps({**answer, "rows": rows}, indent=2) + "\n")


def _row(name: str, rank: SimulatedRank | Problem) -> dict[str, Any]:
    if isinstance(rank, Problem):
        raise SystemExit(f"{name}: {rank.message}")
    peak, events = rank.record.peaks[0].bytes, rank.record.events or []
    reserved = replay(events).peak_reserved_bytes
    low, high = peak, reserved
    while high - low > STEP_BYTES:
        middle = (low + high) // 2
        fits = replay(events, device_bytes=middle).out_of_memory is None
        low, high = (low, middle) if fits else (middle, high)
    blocks = planned(rank.target).large_bytes / peak
    shares = {"needed_share": high / peak - 1, "reserved_share": reserved / peak - 1, "blocks_share": blocks}
    return {"layout": name, "peak_bytes": peak, **{key: round(value, 4) for key, value in shares.items()}}


if __name__ == "__main__":
    main()
