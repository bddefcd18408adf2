"""Comparisons from Python: what is refused, and a result in a notebook."""

from __future__ import annotations

import pytest

import zerofit as zf
from zerofit.app.comparing.rows import ScalingRow


def test_fields_that_mean_nothing_to_a_comparison_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = zf.Run(model="mlp", optimizer="muon", steps=2, ranks=2, global_batch=33)
    with pytest.raises(zf.UserError) as caught:
        zf.compare_strategies(run, strategies=["dpp"])
    assert [problem.kind for problem in caught.value.problems] == ["strategy", "conflict", "bad-value", "batch-size"]
    assert caught.value.problems[1].where == "optimizer"
    with pytest.raises(zf.UserError) as caught:
        zf.compare_strategies(zf.Run(model="mlp", ranks=2), slow={2: 4.0, 1: 0.5}, straggle=1.5)
    assert [problem.where for problem in caught.value.problems] == ["--slow", "--slow", "--straggle"]
    with pytest.raises(zf.UserError, match="not an integer"):
        zf.compare_sizes(zf.Run(model="mlp", epochs=1.5))
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_in_a_notebook(tmp_path):
    fixed = {"strategy": "ddp", "title": "", "processes": 2, "synchronous": True, "lines": 9, "seconds": 1.0}
    good = ScalingRow(**fixed, status="ok", mode="weak", ranks=2, global_batch=16, samples_per_s=123.0)
    failed = ScalingRow(**fixed, status="failed", reason="<b>", mode="strong", ranks=2, global_batch=16)
    about = {"model": "<mlp>", "data": "digits", "accelerator": "cpu", "ranks": 2}
    compared = zf.Comparison(kind="scaling", about=about, rows=[good, failed])
    html = compared._repr_html_()
    assert "&lt;mlp&gt;" in html
    assert "<td>123</td>" in html
    assert "<td>failed</td>" in html
    compared.plot(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert compared.to_dict()["rows"][1]["reason"] == "<b>"
