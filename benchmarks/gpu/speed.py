"""Speed for its own sake: what `tune` finds, and zerofit beside a hand-written loop, Accelerate and the Trainer."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zerofit as zf
from zerofit.spec.run_folder import RunFolder

from .part import Measure
from .training import MODELS

ROOT = Path(__file__).parents[2]
TUNE_MINUTES = 2.0
STEPS, SETTLE = 60, 20  # of the winner, and those that are not counted
GLOBAL_BATCHES = {"llama-1b": 32, "llama-8b": 8, "resnet50": 256}


def cases(rehearse: bool) -> list[str]:
    """Overhead first: it is the promise; then the best of each model, plain and compiled."""
    if rehearse:
        return ["overhead lenet", "tune mlp"]
    overhead = [f"overhead {name}" for name in ("llama-0.5b", "resnet50", "llama-0.5b-fp16")]
    return [*overhead, "tune llama-1b", "tune resnet50", "compiled llama-1b", "tune llama-8b"]


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Measure whole trainings."""
    place = folder / "speed"
    place.mkdir(exist_ok=True)
    yield lambda case: _measure(case, place, rehearse)


def _measure(case: str, place: Path, rehearse: bool) -> dict[str, Any]:
    what, name = case.split()
    if what == "overhead":
        return _overhead(name, place / f"{name}.json", rehearse)
    options = {"model": "mlp", "data": "digits", "precision": "fp32", "global_batch": 64}
    if not rehearse:
        options = {**MODELS[name], "data": "synthetic", "precision": "bf16", "global_batch": GLOBAL_BATCHES[name]}
    run = zf.Run(**{**options, "steps": STEPS, "ranks": 1, "compile": what == "compiled", "save_every": "0"})
    limits: dict[str, Any] = {"minutes": TUNE_MINUTES}
    if rehearse:
        limits = {"trials": 1, "minutes": 2.0, "space": {"zero_stage": 1, "micro_batch": 64}}
    output = place / f"tuned-{what}-{name}"
    tuned = zf.tune(run, output=output, anyway=True, **limits)
    trained = RunFolder(Path(zf.train(output / "run.yaml").run_dir))
    records = [json.loads(line) for line in trained.metrics.read_text().splitlines()][SETTLE:]
    names = ("samples_per_s", "tokens_per_s", "mfu", "reserved_bytes")
    medians = {n: statistics.median(r[n] for r in records) for n in names if records[0].get(n) is not None}
    return {**medians, "best": tuned.to_dict()["best"], "trials": len(tuned.trials)}


def _overhead(workload: str, path: Path, rehearse: bool) -> dict[str, Any]:
    """The turns of `benchmarks/overhead.py`."""
    argv = [sys.executable, "benchmarks/overhead.py", "--workload", workload, "--output", str(path)]
    argv += ["--quick"] if rehearse else ["--launches", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if not path.exists():
        raise RuntimeError(f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    (found,) = json.loads(path.read_text())["results"]
    return {name: value for name, value in found.items() if name not in ("losses", "ds_config")}
