"""`--measured`: one speed of the user's own scales all forecasts; the plainest of layouts that are alike is written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

import zerofit as zf
from tests.cli.asking import answer
from tests.plan.stub import Formula, make_cluster, make_profile
from zerofit.app.planning.corrections import MeasuredSpeed
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import CLASSES, PAIRS
from zerofit.plan.result import plain
from zerofit.plan.search import search
from zerofit.plan.space import PlanRequest

asked = partial(answer, "plan")

MINE = ["--zero-stage", 2, "--micro-batch", 4, "--global-batch", 64]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    file.write_text(json.dumps(make_profile().as_dict()))
    return ["--profile", str(file), "--gpus", "8", "--gpu", "h100-80gb"]


def test_one_figure_scales_all_layouts(stored):
    free = asked(*stored, "--global-batch", 64, "--top", 5000)
    rest = ["--tensor-parallel", 1, "--no-activation-checkpointing", "--offload", "none", "--top", 1]
    mine = asked(*stored, *MINE, *rest)
    forecast = mine["layouts"][0]["samples_per_s"]
    found = asked(*stored, *MINE, "--measured", f"{forecast / 2}samples/s", "--top", 5000)
    assert found["measured"]["factor"] == pytest.approx(2, rel=0.01)  # speeds have three digits
    assert found["measured"]["layout"]["zero_stage"] == 2 and found["measured"]["layout"]["micro_batch"] == 4
    assert {row["zero_stage"] for row in found["layouts"]} == {0, 1, 2, 3}  # the others are searched for

    def steps(answer: dict) -> dict:
        names = ("zero_stage", "offload", "micro_batch", "tp", "pp", "sp", "activation_checkpointing")
        return {tuple(row[name] for name in names): row["step_s"] for row in answer["layouts"]}

    before, after = steps(free), steps(found)
    assert before.keys() == after.keys() and len(before) > 50
    assert all(after[key] == pytest.approx(2 * before[key], rel=0.02) for key in before)


def test_the_figure_narrows_the_intervals(stored):
    assert PAIRS.high / PAIRS.low < CLASSES["text"].high / CLASSES["text"].low
    found = asked(*stored, *MINE, "--measured", "0.05s", "--top", 500)
    for row in found["layouts"]:
        low, high = row["step_s_range"]
        known = all(row[name] == value for name, value in found["measured"]["layout"].items())
        wide = (1, 1) if known else (PAIRS.low, PAIRS.high)
        assert (low / row["step_s"], high / row["step_s"]) == pytest.approx(wide)


def test_units_say_the_same():
    layout = PlannedLayout(zero_stage=1, micro_batch=8, dp=8)
    for text in ("6.4samples/s", "6.4 images/s", "6553.6tokens/s", "10s", "1e1 S"):
        assert MeasuredSpeed.parse(text).step_s(layout, 1024) == pytest.approx(10)
    with pytest.raises(zf.UserError, match="uses images"):
        MeasuredSpeed.parse("5tokens/s").step_s(layout, None)
    for text in ("5", "0samples/s", "-1s", "fast", "5tokens"):
        with pytest.raises(zf.UserError, match="--measured"):
            MeasuredSpeed.parse(text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--measured", "5samples/s"], "--zero-stage is missing"),
        (["--measured", "5samples/s", "--zero-stage", 1], "--micro-batch is missing"),
        ([*MINE, "--measured", "much"], "got 'much'"),
        ([*MINE, "--measured", "5samples/s", "--gpu", "l4"], "one kind of machine"),
    ],
)
def test_what_it_needs_is_said(stored, flags, words):
    answer = asked(*stored, *flags, code=2)
    wrong = answer.get("errors") or [answer["error"]]
    assert any(words in p["message"] for p in wrong), wrong


def test_a_json_describes_what_was_measured_and_others_are_written(stored, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}))
    found = asked(*stored, "--ds-config", file, "--measured", "3samples/s", "--write", tmp_path / "out")
    assert found["measured"]["layout"]["zero_stage"] == 3
    written = json.loads((tmp_path / "out" / "ds_config.json").read_text())
    chosen = found["layouts"][found["written_layout"]]
    assert written["zero_optimization"]["stage"] == chosen["zero_stage"] < 3


def test_the_plainest_that_forecasts_cannot_tell_from_the_best():
    profile = make_profile()
    result = search(profile, make_cluster(), PlanRequest(precision="bf16", global_batch=64), Formula(profile), top=500)
    best, taken = result.layouts[0], result.layouts[result.plainest]
    machinery = {n: plain(one.layout)[:4] for n, one in enumerate(result.layouts)}
    near = [n for n, one in enumerate(result.layouts) if best.samples_per_s <= PAIRS.high * one.samples_per_s]
    assert 0 < len(near) < len(result.layouts) and result.plainest in near
    assert machinery[result.plainest] == min(machinery[n] for n in near)
    alike = [n for n in near if machinery[n] == machinery[result.plainest]]
    assert result.plainest == alike[0]  # the fastest of those
    assert taken.samples_per_s == max(result.layouts[n].samples_per_s for n in alike)
    without = replace(result, layouts=tuple(replace(one, errors=None) for one in result.layouts))
    assert best.samples_per_s < 1.04 * result.layouts[without.plainest].samples_per_s


def test_from_python(stored):
    cluster = zf.Cluster("h100-80gb", gpus=8)
    plan = zf.plan(profile=stored[1], cluster=cluster, zero_stage=1, micro_batch=8, measured="1000tokens/s")
    assert plan.scaling is not None and plan.scaling.measured_step_s == pytest.approx(8 * 8 * 1024 / 1000)
    assert "x their forecasts" in str(plan.scaling)
