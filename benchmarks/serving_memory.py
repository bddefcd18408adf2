"""What vLLM printed at its start (serving_logs.json) beside what `zerofit plan --serve` says.

python benchmarks/serving_memory.py [tuned|all] [--output FILE.json]

The constants of zerofit.rollout.vllm were chosen with the logs that are marked "tuned". "all" adds the others.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zerofit.app.planning.serving import served_model
from zerofit.rollout.vllm import EngineMemory, EngineSettings
from zerofit.spec.device_file import GIB
from zerofit.spec.devices import find_device

HERE = Path(__file__).parent
PRINTED = ("weights", "activations", "kv", "tokens", "blocks", "sequences")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="?", choices=("tuned", "all"), default="tuned")
    parser.add_argument("--output", type=Path, help="write the comparison as JSON")
    options = parser.parse_args()
    logs = json.loads((HERE / "serving_logs.json").read_text())["logs"]
    rows = [compare(log) for log in logs if log["tuned"] or options.logs == "all"]
    for row in rows:
        figures = "  ".join(f"{name} {row['errors'][name]:+.1%}" for name in PRINTED if name in row["errors"])
        print(f"{'tuned' if row['tuned'] else 'held out':8}  {row['model']:20} {row['release']:5} {figures}")
    for tuned in (True, False):
        for name in ("kv", "cache", "sequences"):
            errors = [abs(row["errors"][name]) for row in rows if row["tuned"] is tuned and name in row["errors"]]
            if errors:
                median, high = np.percentile(errors, 50), np.percentile(errors, 90)
                label = "tuned" if tuned else "held out"
                print(f"{label}: {name}: median {median:.1%}, 90th percentile {high:.1%} of {len(errors)}")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def compare(log: dict[str, Any]) -> dict[str, Any]:
    """Return the relative errors of a log's figures."""
    model = served_model(log["model"], {})
    device = replace(find_device(log["gpu"]), memory_bytes=round(log["total"] * GIB))
    settings = EngineSettings.read(log["settings"], log["source"]).settled(model, device)
    engine = EngineMemory(model=model, settings=settings, device=device)
    found = {
        "weights": engine.weights / GIB,
        "activations": engine.activations / GIB,
        "kv": engine.cache_bytes / GIB,
        "tokens": engine.cache.tokens(engine.blocks, engine.need),
        "blocks": engine.blocks,
        "sequences": engine.sequences,
    }
    errors = {name: found[name] / log[name] - 1 for name in PRINTED if name in log}
    size = next((errors[name] for name in ("blocks", "tokens") if name in errors), None)
    return {
        "source": log["source"],
        "tuned": log["tuned"],
        "model": log["model"],
        "release": log["settings"]["release"],
        "forecast": {name: round(value, 3) for name, value in found.items()},
        "errors": {name: round(error, 4) for name, error in errors.items()}
        | ({"cache": round(size, 4)} if size is not None else {}),
    }


if __name__ == "__main__":
    main()
