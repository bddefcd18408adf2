"""`--trace` of `zerofit plan` and `zerofit simulate`: a file for Perfetto, as long as the step that is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.asking import answer
from tests.plan.stub import make_profile
from tests.plan.test_step_trace import check_format, complete
from tests.simulate.targets import TINY
from zerofit.cli.main import main

H100 = ["--gpus", "8", "--gpu", "h100-80gb"]


def read(path: Path) -> dict:
    trace = json.loads(path.read_text())
    check_format(trace)
    return trace


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    file.write_text(json.dumps(make_profile().as_dict()))
    return file


@pytest.mark.parametrize(
    "flags", [[], ["--pipeline", 4, "--global-batch", 64], ["--zero-stage", 3, "--offload", "cpu"]]
)
def test_a_plans_trace_ends_with_its_step(stored, tmp_path, flags):
    path = tmp_path / "step.json"
    plan = answer("plan", "--profile", stored, *H100, *flags, "--trace", path)
    assert plan["trace"] == str(path)
    trace, layout = read(path), plan["layouts"][plan["plainest"]]
    assert trace["otherData"]["step_s"] == pytest.approx(layout["step_s"])
    assert max(e["ts"] + e["dur"] for e in complete(trace)) == pytest.approx(1e6 * layout["step_s"], abs=0.01)
    assert {event["pid"] for event in complete(trace)} == {stage * 8 // layout["pp"] for stage in range(layout["pp"])}
    highest = max(sum(e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C")
    if layout["peak_phase"] != "init":
        assert highest == pytest.approx(layout["peak_bytes"], abs=2)


def test_what_does_not_fit_has_a_trace_too(stored, tmp_path):
    path = tmp_path / "step.json"
    pinned = ["--zero-stage", 0, "--micro-batch", 65536]
    plan = answer("plan", "--profile", stored, *H100, *pinned, "--trace", path, code=1)
    assert read(path)["otherData"]["step_s"] == pytest.approx(plan["misfits"][0]["step_s"])


def test_a_measured_speed_scales_the_trace(stored, tmp_path):
    path = tmp_path / "step.json"
    measured = ["--zero-stage", 1, "--micro-batch", 2, "--measured", "3s", "--trace", path]
    plan = answer("plan", "--profile", stored, *H100, *measured)
    step_s = plan["layouts"][plan["plainest"]]["step_s"]
    assert read(path)["otherData"]["step_s"] == pytest.approx(step_s) and step_s > 1


def test_a_simulated_rank_has_its_times_and_its_memory(tmp_path):
    path = tmp_path / "step.json"
    words = ["llama-tiny", "--model-args", json.dumps(TINY), "--seq-len", 16, "--micro-batch", 2]
    words += ["--gradient-accumulation-steps", 2, "--ds-config", "zero3", "--gpus", 2, "--gpu", "l4", "--rank", 1]
    found = answer("simulate", *words, "--no-knobs", "--trace", path)
    assert found["trace"] == str(path)
    trace = read(path)
    assert {event["pid"] for event in trace["traceEvents"]} == {1}
    memory = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    steps = [phase for phase in found["phases"] if phase["step"] == max(p["step"] for p in found["phases"])]
    assert max(sum(event["args"].values()) for event in memory) == max(phase["peak_bytes"] for phase in steps)
    assert [event["ts"] for event in memory] == sorted(event["ts"] for event in memory)


def test_where_nothing_can_be_written_is_said_before_any_work(stored, tmp_path):
    place = tmp_path / "missing" / "step.json"
    assert answer("plan", "--profile", stored, *H100, "--trace", place, code=2)["error"]["where"] == "--trace"
    assert answer("simulate", "llama-tiny", "--trace", place, code=2)["error"]["where"] == "--trace"
    behind = ["simulate", "--trace", place, "--gpu", "l4", "--json"]
    done = CliRunner().invoke(main, [*map(str, behind), "--", "python", "train.py"])
    assert done.exit_code == 2 and "--trace" in done.output
