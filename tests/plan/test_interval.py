"""Intervals of forecast step times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.plan.stub import Formula, make_cluster, make_profile
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import CLASSES, PAIRS, TITAN, class_of, errors_of
from zerofit.plan.rates import FITTED
from zerofit.plan.search import search
from zerofit.plan.space import PlanRequest

RESULT = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "time-accuracy.json").read_text())


def test_classes_and_coefficients_are_those_of_the_benchmark():
    assert {name: [one.figures, one.low, one.high] for name, one in CLASSES.items()} == RESULT["classes"]
    assert [PAIRS.figures, PAIRS.low, PAIRS.high] == RESULT["pairs_interval"]
    assert {name: getattr(FITTED, name) for name in RESULT["coefficients"]} == RESULT["coefficients"]


def test_four_of_five_figures_of_other_sources_lie_within():
    coverage = RESULT["coverage"]
    assert set(coverage) == {*CLASSES, "all"} and all(0.75 <= share <= 0.85 for share in coverage.values()), coverage


def test_what_a_layout_is_compared_with():
    plain = PlannedLayout(zero_stage=2, micro_batch=1)
    host, pipeline = replace(plain, offload_optimizer="cpu"), replace(plain, zero_stage=1, pp=2)
    expected = [
        (host, "image", None, 1, "image"),
        (replace(host, pp=2), "causal-lm", 1024, 4, "offload"),
        (replace(pipeline, tp=2), "causal-lm", 65536, 4, "pipeline"),
        (replace(plain, tp=2), "causal-lm", 65536, 4, "tensor"),
        (plain, "causal-lm", 16384, 4, "long"),
        (replace(plain, engine="fsdp2"), "causal-lm", 4096, 4, "fsdp2"),
        (plain, "masked-lm", 512, 2, "nodes"),
        (plain, "classify", 128, 1, "text"),
    ]
    assert (
        [class_of(*facts) for *facts, _ in expected]
        == [name for *_, name in expected]
        == list(dict.fromkeys(name for *_, name in expected))
    )


def test_each_layout_has_the_interval_of_its_class():
    profile = make_profile()
    request = PlanRequest(precision="bf16", global_batch=64, every=True)
    ranked = search(profile, make_cluster(), request, Formula(profile), top=1000).layouts
    names = {"offload", "pipeline", "tensor", "text"}
    assert {one.errors for one in ranked} == {CLASSES[name] for name in names}
    for one in ranked:
        assert (one.errors == CLASSES["offload"]) == (one.layout.offload != "none")
        low, high = one.to_dict()["step_s_range"]
        assert low < one.step_s < high
    layout = replace(ranked[0].layout, engine="torchtitan")
    assert errors_of(layout, profile.task, profile.seq_len, 1) is TITAN
    corrected = search(profile, make_cluster(), request, Formula(profile), correct=lambda layout, step_s: 2 * step_s)
    assert all(one.errors is None and one.to_dict()["step_s_range"] is None for one in corrected.layouts)
