"""How far forecasts of CPU step times are from real ones, without and with `zerofit calibrate`.

    python benchmarks/cpu_step_times.py --measure FOLDER     # trains; a few minutes on two cores
    python benchmarks/cpu_step_times.py FOLDER [--output FILE]

`--measure` trains each case and keeps what a step took of a rank's processor, of the rank that took most: on an idle
machine that is all of the step but what waits, and it stays so on a busy one. Without it kept steps are held against
forecasts with the catalogue's rates and with the calibration of the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.space import Degrees
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import Calibration, read_calibration
from zerofit.spec.run_folder import Job, RunFolder

STEPS, WARM = 26, 6  # steps of a case, and those that do not count
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
CASES: dict[str, dict[str, Any]] = {
    "llama, ZeRO-1": {"model": "llama-tiny", "seq_len": 256, "micro_batch": 4, "ds_config": "zero1"},
    "llama, ZeRO-3": {"model": "llama-tiny", "seq_len": 128, "micro_batch": 8, "ds_config": "zero3"},
    "llama, bf16": {"model": "llama-tiny", "seq_len": 256, "micro_batch": 4, "ds_config": "zero2", "precision": "bf16"},
    "gpt2, two micro batches": {
        "model": "gpt2",
        "model_args": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 8192},
        "seq_len": 128,
        "micro_batch": 2,
        "gradient_accumulation_steps": 2,
        "ds_config": "zero2",
    },
    "bert": {"model": "bert-base", "model_args": SMALL, "seq_len": 128, "micro_batch": 2, "ds_config": "zero1"},
    "vit": {
        "model": "vit-b-16-hf",
        "model_args": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768},
        "micro_batch": 2,
        "ds_config": "zero1",
    },
    "resnet18": {"model": "resnet18", "image_size": 32, "micro_batch": 16, "ds_config": "zero0"},
    "llama, checkpointing": {
        "model": "llama-tiny",
        "model_args": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4},
        "seq_len": 128,
        "micro_batch": 2,
        "activation_checkpointing": True,
        "ds_config": "zero1",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs are, or go with --measure")
    parser.add_argument("--measure", action="store_true", help="train the cases that are not there")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.measure:
        for name, case in CASES.items():
            if not (arguments.folder / slug(name) / "busy.json").exists():
                train(arguments.folder / slug(name), case)
    rows = {name: compared(arguments.folder / slug(name)) for name in CASES if busy_file(arguments.folder, name)}
    for name, row in rows.items():
        print(f"{name:26s}", ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    result = {"cases": rows, **{f"median_error_{how}": median_error(rows, how) for how in ("before", "calibrated")}}
    print({key: value for key, value in result.items() if key != "cases"})
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def busy_file(folder: Path, name: str) -> bool:
    return (folder / slug(name) / "busy.json").exists()


def train(folder: Path, case: dict[str, Any]) -> None:
    """Train a case, and keep the processor seconds of its ranks at each step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = folder.with_suffix(".json")
    fixed = {"ranks": 2, "data": "synthetic", "steps": STEPS, "output": str(folder)}
    run.write_text(json.dumps({**case, **fixed}))
    process = subprocess.Popen([Path(sys.executable).with_name("zerofit"), "train", run, "--anyway"])
    metrics, seen, samples = folder / "metrics.jsonl", 0, []
    while process.poll() is None:
        time.sleep(0.02)
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps > seen:
            seen = steps
            samples.append((steps, busy_s(process.pid)))
    samples = [(step, busy) for step, busy in samples if step >= WARM]
    (first, before), (last, after) = samples[0], samples[-1]
    per_step = max((after[pid] - before[pid]) / (last - first) for pid in before if pid in after)
    walls = [json.loads(line)["step_s"] for line in metrics.read_text().splitlines()][WARM:]
    figures = {"busy_s": per_step, "median_s": statistics.median(walls), "least_s": min(walls)}
    (folder / "busy.json").write_text(json.dumps(figures))
    print(case["model"], figures, flush=True)


def busy_s(pid: int) -> dict[int, float]:
    """Return the processor seconds of all processes that a command has started, its ranks with all their threads."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            times = child.cpu_times()
            found[child.pid] = times.user + times.system
        except psutil.Error:
            continue
    return found


def compared(folder: Path) -> dict[str, float]:
    """Return what a step took, and its forecasts."""
    measured = json.loads((folder / "busy.json").read_text())
    calibration = read_calibration("cpu")
    forecasts = {"before": forecast_s(folder, None), "calibrated": forecast_s(folder, calibration)}
    return {**measured, **forecasts}


def forecast_s(folder: Path, calibration: Calibration | None) -> float:
    job = Job.read(RunFolder(folder))
    run, cluster = job.run, Cluster("cpu", gpus=2)
    profile, _ = get_profile(
        ProfileRequest(
            model=str(run.model),
            precision=job.precision,
            device="cpu",
            seq_len=run.seq_len,
            image=f"image:3x{run.image_size}x{run.image_size}" if run.image_size else None,
            model_args=run.model_args or {},
            degrees=(Degrees(),),
            partial=run.partial,
        ),
        Reporter(),
    )
    return Timer(profile, cluster, rates_of(cluster, job.precision, calibration)).step(PlannedLayout.of(job)).step_s


def median_error(rows: dict[str, dict[str, float]], how: str) -> float:
    """Return the median of |forecast / measured - 1|."""
    return round(statistics.median(abs(row[how] / row["busy_s"] - 1) for row in rows.values()), 4)


if __name__ == "__main__":
    main()
