"""Memory that torch's allocator reserved in published runs, beside what `zerofit simulate -- SCRIPT` says.

python benchmarks/reserved_memory.py [--cases ID ...] [--output FILE.json]

Trainer runs on A100s, measured by nvidia-smi (reserved_memory.json), and the runs on an H100 that results/gpu-*.json
has. nvidia-smi also shows the context and NCCL's buffers, as `smi_bytes` does. FSDP runs use FSDP 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zerofit.models.presets import PRESETS

HERE = Path(__file__).parent
GIB = 2**30
OTHERS = "--optim adamw_torch --report_to none --save_strategy no"  # the optimizer of their transformers, 4.48
ACCELERATE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 1
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="ID", help="only these")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rows = []
    for case in json.loads((HERE / "reserved_memory.json").read_text())["cases"]:
        if not options.cases or case["id"] in options.cases:
            rows.append(compare(case))
            print("{id:20} {measured_gib:6} GiB measured, {likely_gib:6} forecast: {error:+.1%}".format(**rows[-1]))
    rows += [] if options.cases else on_h100()
    errors = sorted(abs(row["error"]) for row in rows)
    tenths = statistics.quantiles(errors, n=10, method="inclusive") if len(errors) > 1 else [*errors * 9]
    ranges = [row["low_gib"] <= row["measured_gib"] <= row["high_gib"] for row in rows if "low_gib" in row]
    summary = {"figures": len(rows), "median": round(statistics.median(errors), 4), "p90": round(tenths[-1], 4)}
    print(summary, f"{sum(ranges)} of {len(ranges)} inside their interval")
    if options.output:
        options.output.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Simulate a case's script; compare what nvidia-smi showed with the forecast and its interval."""
    with tempfile.TemporaryDirectory() as folder:
        config = case["model"] if isinstance(case["model"], dict) else PRESETS[case["model"]]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "accelerate.yaml").write_text(ACCELERATE)
        launcher = f"accelerate launch --config_file {folder}/accelerate.yaml" if case["gpus"] > 1 else "python"
        script = f"{HERE}/scripts/full_length.py --model {folder} --lora {case['lora']} --output_dir {folder}/out"
        sizes = f"--per_device_train_batch_size {case['micro_batch']} --max_steps 3 --gradient_checkpointing"
        flags = f"simulate --gpu a100-80gb --gpus {case['gpus']} --no-knobs --json --"
        words = f"{sys.executable} -m zerofit {flags} {launcher} {script} {sizes} {OTHERS}"
        answer = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    found = json.loads(answer.stdout.splitlines()[-1])
    low, high = found["smi_range_bytes"]
    return {
        "id": case["id"],
        "measured_gib": round(case["smi_gib"], 2),
        "likely_gib": round(found["smi_bytes"] / GIB, 2),
        "low_gib": round(low / GIB, 2),
        "high_gib": round(high / GIB, 2),
        "error": round(found["smi_bytes"] / GIB / case["smi_gib"] - 1, 4),
        "allocated_error": round(found["peak_bytes"] / GIB / case["allocated_gib"] - 1, 4),
    }


def on_h100() -> list[dict[str, Any]]:
    """Return the figures of benchmarks.gpu on an H100: torch.cuda.max_memory_reserved and the forecast."""
    rows = []
    for name, key in (("gpu-training", "reserved_bytes"), ("gpu-scripts", "max_memory_reserved")):
        for case, found in json.loads((HERE / f"results/{name}.json").read_text())["cases"].items():
            real, ours = found["real"][key], found["forecast"]["reserved_bytes"]
            sizes = {"measured_gib": round(real / GIB, 2), "likely_gib": round(ours / GIB, 2)}
            rows.append({"id": case, **sizes, "error": round(ours / real - 1, 4)})
    return rows


if __name__ == "__main__":
    main()
