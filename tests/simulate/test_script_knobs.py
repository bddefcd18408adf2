"""Which changes of a script are tried, without simulating them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerofit.simulate.forecast import script_knobs as knobs
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import ScriptCommand
from zerofit.simulate.script.target import ScriptTarget
from zerofit.spec.cluster import Cluster


def changes(packages: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **facts: object) -> list[str]:
    """Return the changes for a Trainer of one GPU on a machine with these packages."""
    monkeypatch.setattr(knobs, "find_spec", lambda name: SimpleNamespace() if name in packages else None)
    plain = {field.name: False for field in fields(ScriptFacts)} | {"sharding": "", "micro_batch": 1, "trainer": True}
    command = ScriptCommand(words=("train.py",), launcher="python", script="train.py", is_module=False, arguments=())
    target = ScriptTarget(command=command, device=Cluster("h100-80gb").device, gpus=1, nodes=1)
    found = knobs.script_knobs(command, SimpleNamespace(**plain | facts), target, tmp_path)
    return [knob.change for knob in found]


def test_ligers_kernels_are_tried_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    change, both = {"liger_kernel", "triton"}, "TrainingArguments(gradient_checkpointing=True, use_liger_kernel=True)"
    tried = changes(change, monkeypatch, tmp_path, takes_liger=True)
    assert tried[0] == "TrainingArguments(use_liger_kernel=True)"
    assert both in tried
    assert "liger" not in " ".join(changes({"liger_kernel"}, monkeypatch, tmp_path, takes_liger=True))
    assert "liger" not in " ".join(changes(change, monkeypatch, tmp_path, takes_liger=False))
