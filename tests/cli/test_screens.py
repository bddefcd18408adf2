"""Answers at 60, 80, 120 and 200 columns: no line is wider, no cell is cut, and the verdict comes first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

import pytest

from tests.plan.stub import make_profile
from tests.simulate.targets import TINY
from zerofit.app.comparing.rows import Comparison, StrategyRow
from zerofit.app.planning.planner import plan
from zerofit.app.simulation import simulate
from zerofit.app.supervision import TrainingResult
from zerofit.cli.compare import show_strategies
from zerofit.cli.plan_show import show as show_plan
from zerofit.cli.simulate_show import show as show_simulation
from zerofit.cli.simulate_show import show_knobs
from zerofit.cli.train import show as show_training
from zerofit.spec.cluster import Cluster
from zerofit.spec.run import Run

WIDTHS = (60, 80, 120, 200)
MESH = "plan --show-mesh"


@pytest.fixture(scope="module")
def screens(tmp_path_factory) -> dict[str, tuple[Callable[[], object], str]]:
    """What prints each answer, and the beginning of its first line."""
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(json.dumps(make_profile().as_dict()))
    run = Run(model="llama-tiny", model_args=TINY, seq_len=16, micro_batch=2, ds_config="zero2")
    small = simulate(run, Cluster("h100-80gb", gpus=2, device_memory=2**20))
    small.knobs()
    layouts = plan(profile=profile, cluster=Cluster("h100-80gb", gpus=8), global_batch=64)
    nothing = plan(profile=profile, cluster=Cluster("h100-80gb", gpus=8, device_memory=2**30), global_batch=64)
    figures = {"samples_per_s": 24146.2, "speedup": 1.16, "efficiency": 1.16, "peak_bytes_per_rank": 27367833}
    figures |= {"host_bytes_per_rank": 660812595, "comm_bytes_per_step": 159129.0, "loss": 1.9775, "accuracy": 0.526}
    common = {"ranks": 2, "processes": 2, "synchronous": True, "lines": 23, "seconds": 3.0, "title": ""}
    rows = [
        StrategyRow(strategy="parameter-server-async", status="ok", reason=None, **common, **figures),
        StrategyRow(strategy="device-map", status="not-here", reason="needs two devices in one process", **common),
    ]
    compared = Comparison(kind="strategies", about={"model": "lenet", "data": "digits"}, rows=rows)
    trained = TrainingResult(
        run_dir="/runs/a-name-that-is-long-enough-to-be-wider-than-any-terminal-that-is-60-columns-wide",
        steps=400,
        samples=3200,
        tokens=819200,
        train_loss=1.8437,
        eval={"loss": 1.84, "perplexity": 6.3},
        samples_per_s=50.0,
        tokens_per_s=13460.0,
        world_size=2,
        layout={"dp": 2, "tp": 1, "pp": 1, "sp": 1, "zero_stage": 2},
        resumed_from=None,
        unigram_entropy_nats=3.34,
        against_forecast={"memory_bytes": {"measured": 7.4e8, "forecast": 9.7e8, "difference": -0.239}},
    )
    return {
        "simulate": (partial(show_simulation, small, False), "DOES NOT FIT  needs "),
        "simulate --details": (partial(show_simulation, small, True), "DOES NOT FIT  needs "),
        "changes": (partial(show_knobs, small, True), ""),
        "plan": (partial(show_plan, layouts, False, True), "FITS  "),
        MESH: (partial(show_plan, layouts, True, False), "FITS  "),
        "plan of too little": (partial(show_plan, nothing, False, False), "NOTHING FITS  0 of "),
        "compare": (partial(show_strategies, compared), "strategy "),
        "train": (partial(show_training, trained), "DONE  400 steps on 2 ranks, ZeRO-2"),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_answers_fit_the_terminal(screens, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for name, (show, first) in screens.items():
        show()
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        text = "\n".join(lines)
        assert text.lstrip().startswith(first), name
        assert "…" not in text and "\x1b" not in text, name
        wide = [line for line in lines if len(line) > width and len(line.split()[-1]) < width - 36]
        assert not wide, (name, wide)  # but for one word that is wider, which nothing can break


def test_no_word_is_broken_at_any_width(screens, monkeypatch, capsys):
    """Each word at 60 columns is one of those at 200; a mesh is a table at 200 and lines at 60."""
    words = dict[int, set[str]]()
    for width in (200, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        for name, (show, _) in screens.items():
            if name != MESH:
                show()
        words[width] = set(re.findall(r"[\w./()=,:+-]+", capsys.readouterr().out))
    assert words[60] <= words[200]
