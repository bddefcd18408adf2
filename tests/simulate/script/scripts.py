"""Scripts of a test, simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofit.app.simulation import scripts
from zerofit.app.simulation.scripts import simulate_script
from zerofit.simulate.forecast.result import SimulatedScript
from zerofit.simulate.forecast.script_knobs import script_knobs
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def simulated(text: str, words: str = "python train.py", gpus: int = 2, **settings):
    Path("train.py").write_text(text)
    nodes = settings.pop("nodes", 1)
    return simulate_script(words.split(), Cluster("h100-80gb", gpus=gpus, nodes=nodes), **settings)


def refused(text: str, words: str = "python train.py", **settings) -> Problem:
    with pytest.raises(UserError) as caught:
        simulated(text, words, **settings)
    return caught.value.problems[0]


def facts(result) -> SimulatedScript:
    assert isinstance(result.run, SimulatedScript)
    return result.run


def only(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Simulate only the changes with one of these words, to save time."""

    def kept(*args):
        return [knob for knob in script_knobs(*args) if any(word in knob.change for word in words)]

    monkeypatch.setattr(scripts, "script_knobs", kept)
