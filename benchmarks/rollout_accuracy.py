"""How far `zerofit plan --method` is from `zerofit simulate` of TRL with the files of `--write`; see README.md.

python benchmarks/rollout_accuracy.py [--cases WORDS] [--model NAME] [--output FILE.json]

TRL's own scripts run with vLLM on the training's GPUs. Exit code 1 if an error is above its target.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from meter.report import surroundings
from meter.script_cases import save_tokenizer

from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollouts import RolloutPlan, plan_rollouts
from zerofit.app.simulation.scripts import simulate_script
from zerofit.models.catalog import find
from zerofit.models.hf_config import make_config
from zerofit.rollout.methods import METHODS
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.units import shown_bytes

MOST = 0.015  # of each phase that can be the highest: |plan / simulate - 1|
TOKENS, COMPLETION, GPUS = 1024, 512, 4
KEPT: dict[str, dict[str, Any]] = {  # what is fixed in the run
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "lora": {"lora": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {"reference": {"beta": 0.04}, "no-reference": {"beta": 0.0}}
KINDS = {
    "grpo": ("", " reference", " lora"),
    "rloo": ("", " no-reference", " lora"),
    "dpo": ("", " lora"),
    "online-dpo": ("", " lora"),
    "distill": ("", " lora"),
}
CASES = [f"{method} {stage}{more}" for method, kinds in KINDS.items() for more in kinds for stage in ("zero2", "zero3")]
CASES.remove("online-dpo zero3")  # TRL copies the model for its reference, which ZeRO-3 forbids
MODELS = {"online-dpo": ("reward_model_path",), "distill": ("teacher_model_name_or_path",)}  # as large as the model
COMMANDS = {"distill": "distillation"}  # TRL's names of methods
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
    plan = planned(model, name)
    _, config = plan.write(folder)
    found = simulated(config, plan, model, folder)
    memory = plan.best.memory
    names = PHASES if memory.method.scores_first else {**PHASES, "train": (*PHASES["train"], *PHASES["log-probs"])}
    # neither is an allocation of torch
    beside = memory.resident["margin"] + (memory.engine.outside if memory.engine else 0)
    rows = []
    for phase in memory.phases:
        if phase.name in names:
            actual = max(found[key] for key in names[phase.name] if key in found)
            rows.append(row(name, phase.name, phase.bytes - beside, actual, phase is memory.highest))
    return rows


def row(case: str, phase: str, forecast: int, actual: int, highest: bool) -> dict[str, Any]:
    """Return a phase's figures, and print them."""
    error = forecast / actual - 1
    print(f"{case:22} {phase:13} {shown_bytes(forecast):>10} {shown_bytes(actual):>10} {error:+.2%}", flush=True)
    figures = {"planned_bytes": forecast, "simulated_bytes": actual, "error": round(error, 5)}
    return {"case": case, "phase": phase, **figures, "counts": highest or phase in ("generate", "train")}


def planned(model: str, name: str) -> RolloutPlan:
    """Return the plan of one colocated layout."""
    method, *words = name.split()
    layout: Any = {
        "seq_len": TOKENS,
        "precision": "bf16",
        "micro_batch": 2,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": True,
        "offload": "none",
    }
    values: dict[str, Any] = {}
    if METHODS[method].generates:
        values = {"max_completion_length": COMPLETION, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        values["vllm_gpu_memory_utilization"] = 0.3
    for word in words:
        layout |= KEPT.get(word, {})
        values |= SETTINGS.get(word, {})
    request = PlanningRequest(model=model, pins=layout)
    return plan_rollouts(method, request, Cluster("h100-80gb", gpus=GPUS), values)


def simulated(config: Path, plan: RolloutPlan, model: str, folder: Path) -> dict[str, int]:
    """Return the peaks of the second step by phase, from TRL's script with the written files."""
    settings = yaml.safe_load(config.read_text()) | {"model_name_or_path": str(folder / "model"), "report_to": "none"}
    settings |= {name: str(folder / "model") for name in MODELS.get(plan.name, ())}
    config.write_text(yaml.safe_dump(settings))
    make_config(find(model), None, {}).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, samples(plan))))
    script = importlib.util.find_spec(f"trl.scripts.{COMMANDS.get(plan.name, plan.name)}")
    path = script.origin if script else str(Path(__file__).parent / "scripts" / "online_dpo.py")
    words = ["accelerate", "launch", "--num_processes", str(GPUS), path, "--config", str(config)]
    words += ["--dataset_name", str(folder / "data")]
    words += ["--reward_funcs", "think_format_reward"] if plan.name in ("grpo", "rloo") else []
    try:
        result = simulate_script(words, Cluster("h100-80gb", gpus=GPUS))
    except UserError as error:
        raise RuntimeError("\n".join(problem.message for problem in error.problems)) from error
    peaks: dict[str, int] = {}
    for phase in result.phases:
        if phase.step >= 0:
            peaks[phase.name] = max(peaks.get(phase.name, 0), phase.peak_bytes)
    return peaks


def samples(plan: RolloutPlan) -> list[dict[str, Any]]:
    """Return the dataset's rows: prompts of their full length, or pairs that are cut to the full length."""
    if METHODS[plan.name].generates:
        prompt = "a" * (TOKENS - COMPLETION - len("user: \n"))  # the template of the tokenizer adds these
        return [{"prompt": [{"role": "user", "content": prompt}]}] * 64
    answer = [{"role": "assistant", "content": "a" * TOKENS}]
    return [{"prompt": [{"role": "user", "content": "a"}], "chosen": answer, "rejected": answer}] * 64


if __name__ == "__main__":
    sys.exit(main())
