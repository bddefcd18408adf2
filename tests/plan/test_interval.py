"""Intervals of forecast step times."""

from __future__ import annotations

import json
from pathlib import Path

from tests.plan.stub import Formula, make_cluster, make_profile
from zerofit.plan.interval import CLASSES, PAIRS, class_of
from zerofit.plan.rates import FITTED
from zerofit.plan.search import search
from zerofit.plan.space import PlanRequest

RESULT = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "time-accuracy.json").read_text())


def test_classes_and_coefficients_are_those_of_the_benchmark():
    assert {name: [one.figures, one.low, one.high] for name, one in CLASSES.items()} == RESULT["classes"]
    assert [PAIRS.figures, PAIRS.low, PAIRS.high] == RESULT["pairs_interval"]
    assert {name: getattr(FITTED, name) for name in RESULT["coefficients"]} == RESULT["coefficients"]


def test_four_of_five_figures_of_other_sources_lie_within():
    assert 0.75 <= RESULT["coverage"]["all"] <= 0.85


def test_what_a_layout_is_compared_with():
    assert class_of("image", "optimizer:cpu") == "image"
    assert class_of("causal-lm", "optimizer:cpu") == "offload" and class_of("masked-lm", "none") == "text"


def test_each_layout_has_the_interval_of_its_class():
    profile = make_profile()
    request = PlanRequest(precision="bf16", global_batch=64, every=True)
    ranked = search(profile, make_cluster(), request, Formula(profile), top=1000).layouts
    assert {one.errors for one in ranked} == {CLASSES["text"], CLASSES["offload"]}
    for one in ranked:
        assert (one.errors == CLASSES["offload"]) == (one.layout.offload != "none")
        low, high = one.to_dict()["step_s_range"]
        assert low < one.step_s < high
    corrected = search(profile, make_cluster(), request, Formula(profile), correct=lambda layout, step_s: 2 * step_s)
    assert all(one.errors is None and one.to_dict()["step_s_range"] is None for one in corrected.layouts)
