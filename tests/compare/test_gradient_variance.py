"""The picture of docs/formulas.md: what is measured and what is expected, on a small population."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

from benchmarks import gradient_variance


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
    kept = json.loads((Path(gradient_variance.OUT) / "variance.json").read_text())
    assert [one["devices"] for one in kept["rows"]] == list(gradient_variance.DEVICES)
    for one in kept["rows"]:
        assert one["measured"] == pytest.approx(one["expected"], rel=0.1)
