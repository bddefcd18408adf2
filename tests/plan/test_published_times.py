"""The benchmark of step times asks `zerofit plan` as a user does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

import zerofit as zf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = BENCHMARKS / "time_accuracy.py"
CASE = {
    "id": "one",
    "table": "own-h100",
    "model": "llama-3.2-1b",
    "model_config": None,
    "gpu": "h100-80gb",
    "gpus_per_node": 8,
    "nodes": 1,
    "device_overrides": {},
    "seq_len": 1024,
    "image": None,
    "precision": "bf16",
    "micro_batch": 4,
    "accumulation": 1,
    "zero_stage": 2,
    "activation_checkpointing": True,
    "tp": 1,
    "pp": 1,
    "sp": 1,
    "offload_optimizer": "none",
    "offload_param": "none",
    "flash_attention": True,
    "torch_compile": False,
    "framework": "DeepSpeed",
    "kernels": "SDPA",
    "overlap_comm": None,
    "stack": "hf-deepspeed",
    "published_samples_per_s": 100.0,
}
HOST = {"zero_stage": 3, "offload_optimizer": "cpu", "table": "deepcompile-offload"}


def test_no_inside_door_is_left():
    """The benchmark imports what a plan is made of, and changes no rate, layout or profile; it fits coefficients."""
    tree = ast.parse(SOURCE.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {alias.name for node in imports if "zerofit.plan" in str(node.module) for alias in node.names}
    plans = {"Degrees", "LONG", "class_of", "PlannedLayout", "FITTED", "Coefficients", "timer_of", "space_of"}
    assert names == plans | {"check_fit"}
    copied = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) == "replace"]
    assert [call.partition(",")[0] for call in copied] == ["replace(device", "replace(best"]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.mark.parametrize("change", [{}, {"torch_compile": True}, {"framework": "torch FSDP FULL_SHARD"}, HOST])
def test_the_figure_is_that_of_zerofit_plan(change: dict[str, Any], tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import time_accuracy  # pyright: ignore[reportMissingImports]

    case = {**CASE, **change}
    (ratio,) = time_accuracy.Judge([case], tmp_path).ratios(time_accuracy.FITTED).values()
    options = time_accuracy.options_of(case)
    engines = ("fsdp2",) if "FSDP" in case["framework"] else ("deepspeed",)
    if "fsdp2" in engines:
        del options["zero_stage"]
    plan = zf.plan(case["model"], zf.Cluster("h100-80gb", gpus=8), seq_len=1024, engines=engines, top=50, **options)
    speeds = [row.samples_per_s for row in plan.layouts if row.layout.reshard and row.layout.replicas == 1]
    assert max(speeds) == pytest.approx(100 * ratio, rel=0.006)  # a plan has three digits
