"""`zerofit simulate --snapshot`: torch's own memory_viz reads it, and `zerofit explain` finds the forecast in it."""

from __future__ import annotations

import importlib.util
import json
import pickle
from itertools import accumulate
from pathlib import Path

import pytest

from tests.cli.asking import answer
from tests.simulate.targets import TINY
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.memory.snapshot import AllocationOrigin, StackFrame, snapshot_of

MIB = 1 << 20
ORIGIN = AllocationOrigin("parameters", "build", -1, "", "aten::empty", (StackFrame("train.py", 3, "main"),))
RUN = ["--model-args", json.dumps(TINY), "--seq-len", 16, "--precision", "bf16", "--ds-config", "zero2"]


@pytest.fixture(scope="module")
def viz():
    """torch/cuda/_memory_viz.py, without torch."""
    place = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "cuda" / "_memory_viz.py"
    spec = importlib.util.spec_from_file_location("memory_viz", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_by(viz, snapshot) -> None:
    """Let memory_viz sum up, print and plot it: it raises for sizes that do not add up."""
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"total_reserved: {viz.Bytes(reserved)}" in viz.segsum(snapshot)
    assert "TOTAL MEM" in viz.trace(snapshot)
    for plot_segments in (False, True):
        assert "$SNAPSHOT" not in viz.trace_plot(snapshot, plot_segments=plot_segments)
    assert "active_allocated" in viz.memory(snapshot, format_flamegraph=str)


def test_a_simulated_run_in_memory_viz(viz, tmp_path):
    file = tmp_path / "rank.pickle"
    words = ("simulate", "llama-tiny", *RUN, "--gpus", 2, "--gpu", "h100-80gb", "--no-knobs", "--snapshot", file)
    result = answer(*words)
    snapshot = pickle.loads(file.read_bytes())
    read_by(viz, snapshot)
    changes = (e["size"] * {"alloc": 1, "free_completed": -1}.get(e["action"], 0) for e in snapshot["device_traces"][0])
    assert max(accumulate(changes)) == result["peak_bytes"]
    explained = answer("explain", file)
    assert explained["cause"] == "did-not-run-out"
    assert {k: v for k, v in explained["alive"].items() if v and k != "fragments"} == {
        kind: size for kind, size in result["breakdown"].items() if size
    }
    assert result["snapshot"] == str(file)


def test_a_snapshot_that_cannot_be_written(tmp_path):
    words = ("simulate", "llama-tiny", *RUN, "--gpu", "h100-80gb", "--snapshot", tmp_path / "none" / "a.pickle")
    assert answer(*words, code=2)["error"]["where"] == "--snapshot"


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_trace_ends_where_memory_runs_out(viz, conf):
    events = [(0, 30 * MIB), (1, 10 * MIB), (2, 600), (1, -10 * MIB), (0, 4 * MIB, 0), (3, 90 * MIB)]
    snapshot = snapshot_of(events, [ORIGIN] * 4, device_bytes=100 * MIB, settings=read_alloc_conf(conf))
    read_by(viz, snapshot)
    trace = snapshot["device_traces"][0]
    assert trace[-1]["action"] == "oom" and trace[-1]["size"] == 90 * MIB
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert sorted(block["requested_size"] for block in blocks) == [600, 34 * MIB]  # storage 0 was resized
    assert all(block["frames"][0]["name"] == "parameters" for block in blocks)
    segments = sum(
        event["size"] * (1 if event["action"] in ("segment_alloc", "segment_map") else -1)
        for event in trace
        if event["action"].startswith("segment")
    )
    assert segments == sum(segment["total_size"] for segment in snapshot["segments"])
