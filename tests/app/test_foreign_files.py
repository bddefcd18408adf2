"""Files of every kind that zerofit reads, mutated: a value or an error that names the file, never another exception."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoint.made import JOB
from tests.plan.stub import make_profile
from zerofit.app.checking import check, read_arguments
from zerofit.app.explaining import explain
from zerofit.app.fitting.fit import read_choice
from zerofit.app.job.hub_models import missing_files
from zerofit.app.job.requests import is_run_file
from zerofit.app.planning.corrections import read_tuned
from zerofit.app.planning.profiles import read_profile
from zerofit.app.tuning.job import read_space
from zerofit.checkpoint.store import FORMAT, MANIFEST, ManifestError, checksum_of, read_manifest
from zerofit.config.ds_json import bundled
from zerofit.models.inputs import TableInputs, inputs_to_dict
from zerofit.report.traces import measured_kernels, read_trace
from zerofit.simulate.forecast.result import read_baseline
from zerofit.spec.device_file import read_device
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import calibration_file, read_calibration
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK
from zerofit.spec.reservations import read_forecast
from zerofit.spec.run_folder import Job, RunFolder

ROUNDS = 30  # mutations of each kind of file
NASTY = [
    *(None, True, 5, -1, 0, 1.5, 1e308, -1e308, float("nan"), float("inf"), 10**18, 10**299),
    *("", "x", "auto", "\u0000", "é" * 300, "../..", "80GiB", [], {}, [[]], [5], ["x"], {"a": 1}, {"": None}, [{}]),
]
BROKEN = ["", "{", "[" * 1200, '{"a":' * 1200, "9" * 5000, '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', "\x00"]
DEVICE = {"memory": "80GiB", "tflops": {"bf16": 989, "fp32": 67}, "bandwidth": "3TB", "link": "450GB"}
DEVICE |= {"pcie": "63GB", "network": "50GB", "gpus": 8, "host_memory": "1TiB", "price": 3.5, "price_date": "2026"}
TRIAL = {"choice": {"zero_stage": 1, "micro_batch": 2, "by_rank": []}, "compiled": False, "forecast_step_s": 0.5}
TUNED = {"model": "gpt2", "device": "cpu", "measured": [TRIAL | {"peak_bytes": 5, "measured_step_s": 0.4}]}
BASELINE = {"device": "l4", "world_size": 1, "rank": 0, "peak_bytes": 5, "fits": True}
CALIBRATION = {"kind": "cpu", "device_name": "x", "devices": 1, "date": "2026", "matmul_flops": {"fp32": 1e12}}
CALIBRATION |= {"kernels": [{"kind": "product", "dtype": "float32", "seconds": 1.0, "shape": [1, 2, 3]}]}
COMMON = {"ph": "X", "pid": 1, "tid": 1, "dur": 5}
SHAPES = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"], "External id": 3}
EVENTS: list[dict[str, Any]] = [
    {**COMMON, "name": f"{STEP_MARK}4", "ts": 0, "dur": 100},
    {**COMMON, "name": f"{SECTION_MARK}forward|block.0", "ts": 1},
    {**COMMON, "name": "aten::mm", "cat": "cpu_op", "ts": 2, "args": SHAPES},
    {**COMMON, "name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 2, "args": {"correlation": 7}},
    {**COMMON, "name": "gemm", "cat": "kernel", "ts": 9, "args": {"correlation": 7, "External id": 3}},
]
FORECAST = [{**COMMON, "name": "a", "ts": 1, "args": {"kind": "launches", "module": "block.1"}}]
ABOUT = {"made_by": "zerofit", "gpu": "l4", "step_s": 0.5}
ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}}
AXOLOTL = {"base_model": "m", "micro_batch_size": 2, "learning_rate": 1e-4, "deepspeed": "zero2", "datasets": [{}]}
NEOX = {"pipe_parallel_size": 1, "num_layers": 2, "hidden_size": 8, "zero_optimization": {"stage": 1}, "fp16": {}}


def _as_trace(path: Path) -> None:
    read_trace(path)
    measured_kernels(path)


def _as_manifest(path: Path) -> None:
    with suppress(ValueError, TypeError, RecursionError):  # so that more than the checksum is looked at
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    path.rename(path.parent / MANIFEST)
    read_manifest(path.parent)


def _as_index(path: Path) -> None:
    (path.parent / "config.json").write_text("{}")
    path.rename(path.parent / "model.safetensors.index.json")
    missing_files(path.parent)


def _as_calibration(path: Path) -> None:
    calibration_file().parent.mkdir(parents=True, exist_ok=True)
    path.replace(calibration_file())
    read_calibration("cpu")


def _as_plan(path: Path) -> None:
    folder = RunFolder(path.parent)
    JOB.write(folder, {})
    path.replace(folder.plan)
    read_forecast(path.parent)
    read_choice(folder)
    Job.read(folder)


def _as_evidence(path: Path) -> None:
    folder = RunFolder(path.parent)
    JOB.write(folder, {})
    folder.logs.mkdir(exist_ok=True)
    path.replace(folder.metrics if path.name == "metrics.jsonl" else folder.logs / path.name)
    explain(folder.path)


def _checked(path: Path) -> None:
    result = check(path)
    result.fixed()
    result.explain()


def _job() -> dict[str, Any]:
    plain = JOB.to_dict()
    return {name: value for name, value in plain.items() if name not in ("run", "facts", "ds_config")}


INPUTS = inputs_to_dict(TableInputs(features=2, classes=2))
MANIFEST_OF = {"format": FORMAT, "step": 3, "samples": 12, "world_size": 2, "created": "2026-01-01T00:00:00+00:00"}
MANIFEST_OF |= {"versions": {}, "figures": {"loss": 1.0}, "files": {"a/b.pt": {"bytes": 5, "xxh3_128": "x"}}}
MANIFEST_OF["job"] = JOB.to_dict() | {"inputs": INPUTS}
KINDS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "device.yaml": (DEVICE, read_device),
    "space.yaml": ({"zero_stage": [1, 2], "micro_batch": 4, "compile": [True]}, read_space),
    "profile.json": (make_profile().as_dict(), read_profile),
    "tuned.json": (TUNED, read_tuned),
    "baseline.json": (BASELINE, read_baseline),
    "calibration.json": (CALIBRATION, _as_calibration),
    "trace.json": ({"traceEvents": EVENTS}, _as_trace),
    "forecast.json": ({"traceEvents": FORECAST, "otherData": ABOUT}, _as_trace),
    "index.json": ({"metadata": {}, "weight_map": {"a": "a.safetensors"}}, _as_index),
    "made.json": (MANIFEST_OF, _as_manifest),
    "plan.json": (_job(), _as_plan),
    "metrics.jsonl": ({"step": 3, "memory_bytes": 5, "loss": 1.5}, _as_evidence),
    "rank-0.error.json": ({"rank": 0, "problems": [{"kind": "x", "message": "y", "hint": ""}]}, _as_evidence),
    "faults.jsonl": ({"message": "y", "time_s": 1.0}, _as_evidence),
    "run.json": ({"model": "gpt2", "steps": 3}, lambda path: is_run_file(str(path))),
    "accelerate.yaml": (ACCELERATE, lambda path: read_arguments(path, accelerate=True)),
    "axolotl.yaml": (AXOLOTL, lambda path: read_arguments(path, accelerate=False)),
    "neox.yml": (NEOX, _checked),
    "ds.json": (json.loads(bundled()["zero3_offload"].read_text()), _checked),
}


def mutations(valid: Any, name: str) -> Iterator[str]:
    """Yield texts: the valid one, broken ones, and ones in which a value or a key is another, or cut."""
    chance = random.Random(name)
    write = json.dumps if name.endswith((".json", ".jsonl")) else yaml.safe_dump
    yield write(valid)
    yield from BROKEN
    for _ in range(ROUNDS):
        value = copy.deepcopy(valid)
        for _ in range(chance.randint(1, 2)):
            value = _changed(value, chance)
        text = write(value)
        if chance.random() < 0.2:
            cut = chance.randrange(len(text) + 1)
            text = text[:cut] + chance.choice(["", "\\", "{", "- ", ": ", "\t", "&a ", "*a", "!!int ", '"'])
        yield text


def _changed(value: Any, chance: random.Random) -> Any:
    root: list[Any] = [value]
    holder, key = root, 0
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if isinstance(holder, dict) and chance.random() < 0.3:
        kept = holder.pop(key)
        if chance.random() < 0.5:
            holder[chance.choice(["", "enabled", f"{key}s", "a.b", "\u0000"])] = kept
    else:
        holder[key] = copy.deepcopy(chance.choice(NASTY))
    return root[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    valid, read = KINDS[name]
    for number, text in enumerate(mutations(valid, name)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / name
        path.write_text(text)
        try:
            read(path)
        except UserError as error:
            assert all(problem.message for problem in error.problems)
            assert number, "the valid file is refused"
        except ManifestError as error:
            assert number, error
