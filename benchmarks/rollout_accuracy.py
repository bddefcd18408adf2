"""How far `zerofit plan --method grpo` is from `zerofit simulate` of TRL with the files of `--write`; see README.md.

python benchmarks/rollout_accuracy.py [--cases WORDS] [--model NAME] [--output FILE.json]

TRL's own script runs with vLLM on the training's GPUs. Exit code 1 if an error is above its target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from meter.report import surroundings
from meter.script_cases import save_tokenizer
from trl.scripts import grpo  # pyright: ignore[reportMissingImports]

from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollouts import RolloutPlan, plan_rollouts
from zerofit.app.simulation.scripts import simulate_script
from zerofit.models.catalog import find
from zerofit.models.hf_config import make_config
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.units import shown_bytes

MOST = 0.01  # of each phase that can be the highest: |plan / simulate - 1|
TOKENS, COMPLETION, GPUS = 1024, 512, 4
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is fixed in the run, and TRL's settings
    "zero2": ({"zero_stage": 2}, {}),
    "zero3": ({"zero_stage": 3}, {}),
    "zero2 reference": ({"zero_stage": 2}, {"beta": 0.04}),
    "zero3 reference": ({"zero_stage": 3}, {"beta": 0.04}),
    "zero2 lora": ({"zero_stage": 2, "lora": 16}, {}),
    "zero3 lora": ({"zero_stage": 3, "lora": 16}, {}),
}
# phases of plan, and what the simulation calls them
PHASES = {
    "generate": ("generation",),
    "log-probs": ("log-probs",),
    "train": ("forward", "backward", "step"),
    "sync weights": ("weight sync",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[], help="only cases with all these words")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in (name for name in CASES if set(options.cases) <= set(name.split())):
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(name, options.model, Path(folder))
    if options.output:
        options.output.write_text(json.dumps({**surroundings(), "model": options.model, "rows": rows}, indent=1) + "\n")
    return 0 if rows and all(abs(row["error"]) <= MOST for row in rows if row["counts"]) else 1


def compare(name: str, model: str, folder: Path) -> list[dict[str, Any]]:
    """Return the phases of a case as plan and as simulate forecast them."""
    pins, settings = CASES[name]
    plan = planned(model, pins, settings)
    _, config = plan.write(folder)
    found = simulated(config, model, folder)
    memory = plan.best.memory
    assert memory.engine
    # neither is an allocation of torch
    beside = memory.resident["margin"] + memory.engine.outside
    rows = []
    for phase in memory.phases:
        if phase.name in PHASES:
            forecast = phase.bytes - beside
            actual = max((found[key] for key in PHASES[phase.name] if key in found), default=0)
            rows.append(row(name, phase.name, forecast, actual, phase is memory.highest))
    return rows


def row(case: str, phase: str, forecast: int, actual: int, highest: bool) -> dict[str, Any]:
    """Return a phase's figures, and print them."""
    error = forecast / actual - 1 if actual else 0.0
    print(f"{case:16} {phase:13} {shown_bytes(forecast):>10} {shown_bytes(actual):>10} {error:+.2%}", flush=True)
    figures = {"planned_bytes": forecast, "simulated_bytes": actual, "error": round(error, 5)}
    return {"case": case, "phase": phase, **figures, "counts": highest or phase in ("generate", "train")}


def planned(model: str, pins: dict[str, Any], settings: dict[str, Any]) -> RolloutPlan:
    """Return the plan of one colocated layout."""
    layout: Any = {
        "seq_len": TOKENS,
        "precision": "bf16",
        "micro_batch": 2,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": True,
        "offload": "none",
        **pins,
    }
    engine = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}
    values = {"max_completion_length": COMPLETION, **engine, **settings}
    request = PlanningRequest(model=model, pins=layout)
    return plan_rollouts("grpo", request, Cluster("h100-80gb", gpus=GPUS), values)


def simulated(config: Path, model: str, folder: Path) -> dict[str, int]:
    """Return the peaks of the second step by phase, from TRL's script with the written files."""
    settings = yaml.safe_load(config.read_text()) | {"model_name_or_path": str(folder / "model"), "report_to": "none"}
    config.write_text(yaml.safe_dump(settings))
    make_config(find(model), None, {}).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    prompt = "a" * (TOKENS - COMPLETION - len("user: \n"))  # the template of the tokenizer adds these
    rows = [{"prompt": [{"role": "user", "content": prompt}]}] * 64
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["accelerate", "launch", "--num_processes", str(GPUS), grpo.__file__, "--config", str(config)]
    words += ["--dataset_name", str(folder / "data"), "--reward_funcs", "think_format_reward"]
    try:
        result = simulate_script(words, Cluster("h100-80gb", gpus=GPUS))
    except UserError as error:
        raise RuntimeError("\n".join(problem.message for problem in error.problems)) from error
    peaks: dict[str, int] = {}
    for phase in result.phases:
        if phase.step >= 0:
            peaks[phase.name] = max(peaks.get(phase.name, 0), phase.peak_bytes)
    return peaks


if __name__ == "__main__":
    sys.exit(main())
