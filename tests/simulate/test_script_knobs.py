"""Which changes of a script are tried, without simulating them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.launch import launch_command_parser

from zerofit.app.simulation.scripts import ScriptKnobSimulations
from zerofit.simulate.forecast import script_knobs as knobs
from zerofit.simulate.forecast.result import KnobResult
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import ScriptCommand, ScriptTarget, read_command
from zerofit.spec.cluster import Cluster
from zerofit.spec.foreign import read_json


def offered(packages: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **facts: object):
    """Return the changes for a Trainer of one GPU on a machine with these packages, and the command."""
    monkeypatch.setattr(knobs, "find_spec", lambda name: SimpleNamespace() if name in packages else None)
    command = ScriptCommand(words=("train.py",), launcher="python", script="train.py", is_module=False, arguments=())
    return command, of_command(command, tmp_path, trainer=True, **facts)


def of_command(command: ScriptCommand, tmp_path: Path, gpus: int = 1, **facts: object) -> list[knobs.ScriptKnob]:
    plain = {field.name: False for field in fields(ScriptFacts)} | {"sharding": "", "micro_batch": 1}
    target = ScriptTarget(command=command, device=Cluster("h100-80gb").device, gpus=gpus, nodes=1)
    return knobs.script_knobs(command, SimpleNamespace(**plain | facts), target, tmp_path)


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


def parsed_by_accelerate(knob: knobs.ScriptKnob) -> Namespace:
    return launch_command_parser().parse_args(list(knob.command.launcher_words))


@pytest.mark.parametrize("option", ["--config_file={0}", "--config-file {0}", "--config_file {0}", ""])
def test_a_changed_file_keeps_the_settings_of_the_file_that_accelerate_reads(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "mine.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\ndistributed_type: NO\n")
    if not option:
        monkeypatch.setattr("accelerate.commands.config.default_config_file", str(file))
    command = read_command([*f"accelerate launch {option.format(file)}".split(), "train.py"])
    found = of_command(command, tmp_path, accelerate=True, sharding="DDP")
    assert len(found) >= 4
    for knob in found:
        assert knob.file and knob.file["mixed_precision"] == "bf16"
        assert read_json(Path(parsed_by_accelerate(knob).config_file)) == knob.file


@pytest.mark.parametrize("option", ["--zero_stage 1", "--zero_stage=1", "--zero-stage=1", "--use_deepspeed"])
def test_a_changed_option_replaces_the_users(option: str, tmp_path: Path):
    command = read_command(f"accelerate launch {option} train.py --zero_stage 1".split())
    found = {knob.change: knob for knob in of_command(command, tmp_path, gpus=2, engines=1, zero_stage=1)}
    for stage in (2, 3):
        assert parsed_by_accelerate(found[f"--zero_stage {stage}"]).zero_stage == stage


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
