"""Messages of models and ranks hold brackets: they are printed as they are, never read as markup."""

from __future__ import annotations

import pytest

from zerofit.app.comparing.result import Comparison
from zerofit.app.comparing.rows import StrategyRow
from zerofit.cli import compare_show, tune_show

REASONS = ["expected [batch, seq], got [/INST]", "[batch, seq]", "[bold red]x[/]"]


@pytest.mark.parametrize("reason", REASONS)
def test_a_trial_that_crashed(reason, capsys):
    ok = {"configuration": "ZeRO 1", "forecast_step_s": 1.0, "measured_step_s": 1.1, "status": "ok", "spread": 0.01}
    crash = {"configuration": "ZeRO [2]", "forecast_step_s": 1.0, "measured_step_s": None, "status": "crash"}
    regret = {"untried": 0}
    tune_show.show(
        {
            "trials": [{**ok, "cut_short": False}, {**crash, "reason": reason}],
            "best": {"step_s": 1.1, "samples_per_s": 9.0, "tokens_per_s": None},
            "regret": regret,
            "written": ["tuned[/b]/run.yaml"],
        }
    )
    printed = capsys.readouterr().out
    assert reason in printed
    assert "ZeRO [2]" in printed
    assert "written: tuned[/b]/run.yaml" in printed


@pytest.mark.parametrize("reason", REASONS)
def test_a_strategy_that_failed(reason, capsys):
    fixed = {"title": "", "ranks": 2, "processes": 2, "synchronous": True, "lines": 9, "seconds": 1.0}
    row = StrategyRow(strategy="ddp", status="failed", reason=reason, **fixed)
    written = ["out[/b]/results.json"]
    compare_show.show_strategies(Comparison(kind="strategies", about={}, rows=[row], written=written))
    printed = capsys.readouterr().out
    assert f"ddp: {reason}" in printed
    assert "written: out[/b]/results.json" in printed
