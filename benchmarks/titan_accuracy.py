"""Plan's memory for torchtitan against the simulation of torchtitan itself, started by the script that plan writes.

python benchmarks/titan_accuracy.py [NAME ...] [--out FOLDER]

torchtitan has to be installed. Cases that were measured before stay in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from meter.report import surroundings
from programs import prepare

import zerofit as zf
from zerofit.app.planning.output_files import write_torchtitan

DEBUG = {  # llama3_debugmodel
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
MODELS = {
    "debug": ("debug.json", 2048),
    "8b": ("llama-3.1-8b", 8192),
    "70b": ("llama-3.1-70b", 8192),
    "qwen3-14b": ("qwen3-14b", 4096),
    "qwen3-0.6b": ("qwen3-0.6b", 4096),
}
KINDS = {"none": False, "selective": "selective", "full": True}


def case(model: str, gpus: int, checkpointing: str, micro: int, reshard: bool = True, **pins: Any) -> dict[str, Any]:
    """Return a case; `pins` are fixed values of the plan."""
    pins = {"micro_batch": micro, "activation_checkpointing": KINDS[checkpointing], "offload": "none", **pins}
    pins = {"gradient_accumulation_steps": 1, **pins}
    return {"model": model, "gpus": gpus, "reshard": reshard, "pins": pins}


CASES = {
    **{f"debug, FSDP 4, {kind}": case("debug", 4, kind, 8) for kind in KINDS},
    **{f"debug, FSDP 4, micro batch 1, {kind}": case("debug", 4, kind, 1) for kind in KINDS},
    "debug, FSDP 8, no reshard": case("debug", 8, "full", 8, reshard=False),
    "debug, FSDP 4, accumulation 2": case("debug", 4, "selective", 4, gradient_accumulation_steps=2),
    **{f"8B, FSDP 8, {kind}": case("8b", 8, kind, 1) for kind in KINDS},
    "8B, FSDP 8, micro batch 2": case("8b", 8, "full", 2),
    "8B, FSDP 64": case("8b", 64, "selective", 1),
    "Qwen 3 14B, FSDP 8": case("qwen3-14b", 8, "full", 1),
    **{f"debug, FSDP 2 x TP 2, {kind}": case("debug", 4, kind, 8, tensor_parallel=2) for kind in KINDS},
    "debug, TP 4": case("debug", 4, "selective", 2, tensor_parallel=4),
    "8B, FSDP 4 x TP 2": case("8b", 8, "selective", 2, tensor_parallel=2),
    "8B, FSDP 8 x TP 8": case("8b", 64, "full", 1, tensor_parallel=8),
    "70B, FSDP 8 x TP 8": case("70b", 64, "full", 4, tensor_parallel=8),
    "Qwen 3 0.6B (tied), FSDP 4": case("qwen3-0.6b", 4, "full", 2),
    "Qwen 3 0.6B (tied), FSDP 2 x TP 2": case("qwen3-0.6b", 4, "selective", 2, tensor_parallel=2),
    "Qwen 3 14B, FSDP 4 x TP 2": case("qwen3-14b", 8, "selective", 1, tensor_parallel=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(CASES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for titan-accuracy.json")
    asked = parser.parse_args()
    file = asked.out.resolve() / "titan-accuracy.json"
    found = json.loads(file.read_text())["cases"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        Path("debug.json").write_text(json.dumps(DEBUG))
        for name in asked.names or CASES:
            found[name] = measure(CASES[name])
            print(f"{name:40} {found[name]['error_percent']:+.4f} %  {json.dumps(found[name])}", flush=True)
            rows = {name: found[name] for name in CASES if name in found}
            errors = [abs(row["error_percent"]) for row in rows.values()]
            figures = {"median_error_percent": statistics.median(errors), "most_error_percent": max(errors)}
            file.write_text(json.dumps({**surroundings(), **figures, "cases": rows}, indent=1) + "\n")


def measure(one: dict[str, Any]) -> dict[str, Any]:
    """Return the case with both peaks of the rank that needs most, in bytes."""
    model, seq_len = MODELS[one["model"]]
    gpus = one["gpus"]
    cluster = zf.Cluster("h100-80gb", gpus=min(gpus, 8), nodes=max(1, gpus // 8), device_memory="10TB")
    start = time.monotonic()
    plan = zf.plan(model, cluster, engines=["torchtitan"], seq_len=seq_len, **one["pins"])
    planned_s = time.monotonic() - start
    wanted = one["reshard"], 1
    planned = next(run for run in plan.layouts if (run.layout.reshard, run.layout.replicas) == wanted)
    with tempfile.TemporaryDirectory() as folder:
        (script,) = write_torchtitan(Path(folder) / "out", planned.layout, plan.profile, cluster)
        words = shlex.split(script.read_text().partition("torchrun")[2].replace("\\\n", ""))
    place = {
        "$@": ["--hf_assets_path", "llama", "--dataloader.dataset", "c4_test"],
        "$FIRST_HOST:29500": ["host:29500"],
    }
    command = ["torchrun", *(part for word in words for part in place.get(word, [word]))]
    os.environ["HF_HUB_OFFLINE"] = "1"
    start = time.monotonic()
    simulated = zf.simulate_script(command, cluster).peak_bytes
    return {
        **one,
        "planned_bytes": planned.peak_bytes,
        "simulated_bytes": simulated,
        "error_percent": round(100 * (planned.peak_bytes / simulated - 1), 5),
        "plan_s": round(planned_s, 1),
        "simulate_s": round(time.monotonic() - start, 1),
    }


if __name__ == "__main__":
    main()
