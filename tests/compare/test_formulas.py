"""The pictures of docs/formulas.md: their lines are the page's formulas, or exact for a small population."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch

from benchmarks import all_reduce, gradient_variance
from tests.test_docs_python import FORMULAS, run


def test_expected_and_measured_variance_are_those_of_all_draws(monkeypatch):
    torch.manual_seed(3)
    each = torch.randn(8, 5, dtype=torch.float64)
    monkeypatch.setattr(gradient_variance, "SAMPLES", 2)
    found = gradient_variance.row(each, devices=2, draws=4000)
    means = torch.stack([each[list(four)].mean(0) for four in combinations(range(8), 4)])
    exact = (means - each.mean(0)).square().sum(1).mean().item()
    assert found["expected"] == pytest.approx(exact, rel=1e-12)
    assert found["measured"] == pytest.approx(exact, rel=0.05)


def test_the_committed_figures_follow_the_formula():
    kept = json.loads((gradient_variance.OUT / "variance.json").read_text())
    assert [one["devices"] for one in kept["rows"]] == list(gradient_variance.DEVICES)
    for one in kept["rows"]:
        assert one["measured"] == pytest.approx(one["expected"], rel=0.1)


def test_lines_of_an_all_reduce_are_those_of_the_page():
    names: dict[str, Any] = {"__name__": "page"}
    run(FORMULAS.read_text(encoding="utf-8"), names)
    for way in all_reduce.WAYS:
        for ranks, size in ((2, 1024), (4, 2**20), (8, 2**26)):
            line = all_reduce.predicted(way, ranks, size, names["ALPHA"], names["BETA"])
            assert line == pytest.approx(names[way](ranks, size))


def test_committed_all_reduces_are_whole():
    kept = json.loads((all_reduce.OUT / "results.json").read_text())["groups"]
    for ranks, group in kept.items():
        found = {(row["way"], row["bytes"]) for row in group["rows"]}
        assert found == {(way, size) for way in (*all_reduce.WAYS, "gloo") for size in all_reduce.SIZES}, ranks
        assert group["alpha_s"] > 0 and group["beta_bytes_s"] > 0
