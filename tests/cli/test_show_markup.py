"""Messages of models and ranks hold brackets: they are printed as they are, never read as markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zerofit.app.comparing.rows import Comparison, StrategyRow
from zerofit.cli.compare import show_strategies
from zerofit.cli.tune import show
from zerofit.plan.layout import PlannedLayout
from zerofit.tune.search import Search, TuneResult
from zerofit.tune.trial import Candidate, Trial

REASONS = ["expected [batch, seq], got [/INST]", "[batch, seq]", "[bold red]x[/]"]


@pytest.mark.parametrize("reason", REASONS)
def test_a_trial_that_crashed(reason, capsys):
    good, bad = (
        Candidate(layout=PlannedLayout(zero_stage=n, micro_batch=4), forecast_step_s=1.0, peak_bytes=9) for n in (1, 2)
    )
    ok = Trial(key=good.key, status="ok", forecast_step_s=1.0, measured_step_s=1.1)
    crash = Trial(key=bad.key, status="crash", forecast_step_s=1.0, reason=reason)
    result = TuneResult.of(Search([good, bad], [ok, crash]), None)
    assert result
    named = replace(result.trials[1], configuration="ZeRO [2]")
    written = (Path("tuned[/b]/run.yaml"),)
    show(replace(result, trials=(result.trials[0], named), written=written))
    printed = capsys.readouterr().out
    assert reason in printed
    assert "ZeRO [2]" in printed
    assert "tuned[/b]/run.yaml" in printed


@pytest.mark.parametrize("reason", REASONS)
def test_a_strategy_that_failed(reason, capsys):
    fixed = {"title": "", "ranks": 2, "processes": 2, "synchronous": True, "lines": 9, "seconds": 1.0}
    row = StrategyRow(strategy="ddp", status="failed", reason=reason, **fixed)
    written = ["out[/b]/results.json"]
    show_strategies(Comparison(kind="strategies", about={}, rows=[row], written=written))
    printed = capsys.readouterr().out
    assert f"ddp: {reason}" in printed
    assert "written: out[/b]/results.json" in printed
