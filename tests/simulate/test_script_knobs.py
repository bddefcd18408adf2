"""Which changes of a script are tried, without simulating them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerofit.app.simulation.scripts import ScriptKnobSimulations
from zerofit.simulate.forecast import script_knobs as knobs
from zerofit.simulate.forecast.result import KnobResult
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import ScriptCommand
from zerofit.simulate.script.target import ScriptTarget
from zerofit.spec.cluster import Cluster


def offered(packages: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **facts: object):
    """Return the changes for a Trainer of one GPU on a machine with these packages, and the command."""
    monkeypatch.setattr(knobs, "find_spec", lambda name: SimpleNamespace() if name in packages else None)
    plain = {field.name: False for field in fields(ScriptFacts)} | {"sharding": "", "micro_batch": 1, "trainer": True}
    command = ScriptCommand(words=("train.py",), launcher="python", script="train.py", is_module=False, arguments=())
    target = ScriptTarget(command=command, device=Cluster("h100-80gb").device, gpus=1, nodes=1)
    return command, knobs.script_knobs(command, SimpleNamespace(**plain | facts), target, tmp_path)


def changes(packages: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **facts: object) -> list[str]:
    return [knob.change for knob in offered(packages, monkeypatch, tmp_path, **facts)[1]]


def test_ligers_kernels_are_tried_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    change, both = {"liger_kernel", "triton"}, "TrainingArguments(gradient_checkpointing=True, use_liger_kernel=True)"
    tried = changes(change, monkeypatch, tmp_path, takes_liger=True)
    assert tried[0] == "TrainingArguments(use_liger_kernel=True)"
    assert both in tried
    assert "liger" not in " ".join(changes({"liger_kernel"}, monkeypatch, tmp_path, takes_liger=True))
    assert "liger" not in " ".join(changes(change, monkeypatch, tmp_path, takes_liger=False))


def test_changes_are_combined_unless_they_exclude_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    command, found = offered({"bitsandbytes"}, monkeypatch, tmp_path, micro_batch=8, accumulation=1, optimizer="AdamW")
    by_text = {knob.change: knob for knob in found}
    halves, recomputes = found[0], by_text["TrainingArguments(gradient_checkpointing=True)"]
    offloads = by_text["TrainingArguments(deepspeed='zero3_offload.json')"]
    eight_bits = by_text["TrainingArguments(optim='adamw_bnb_8bit')"]
    both = halves.with_(recomputes, command)
    every = both and both.with_(offloads, command)
    assert every and every.config == "zero3_offload" and every.with_(eight_bits, command) is None
    assert every.with_(recomputes, command) is None  # it adds nothing
    smallest = every.halved()
    while smallest and (again := smallest.halved()):
        smallest = again
    assert smallest and smallest.change == (
        "TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8, gradient_checkpointing=True, "
        "deepspeed='zero3_offload.json')"
    )


@pytest.mark.parametrize(("room", "wanted"), [(50, "c d"), (35, "c d e"), (5, "c d e")])
def test_the_shortest_combination_that_fits_is_found(room: int, wanted: str):
    command = ScriptCommand(words=("train.py",), launcher="python", script="train.py", is_module=False, arguments=())
    saved = {"c": 30, "d": 25, "e": 20}

    def results(chosen):
        needs = [100 - sum(saved[edit] for edit in knob.edits) for knob in chosen]
        rows = {"reserved_bytes": 0, "outside_bytes": 0, "host_node_bytes": 0}
        return [
            KnobResult(change=knob.change, peak_bytes=n, fits=n <= room, slowdown=0.1 * ord(knob.edits[0]), **rows)
            for knob, n in zip(chosen, needs, strict=True)
        ]

    single = [knobs.ScriptKnob(change=edit, command=command, edits=(edit,)) for edit in saved]
    target = ScriptTarget(command=command, device=Cluster("h100-80gb").device, gpus=1, nodes=1)
    simulations = ScriptKnobSimulations(target=target, record=None, simulation=None, cluster=None)
    (row,) = simulations._combined(list(zip(single, results(single), strict=True)), results)
    assert row.change == wanted.replace(" ", " and ")
