"""Callbacks that a run names by `package.module:Class`, on real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from zerofit.spec.errors import UserError
from zerofit.train.callbacks import Callback, SavedCheckpoint, StepRecord, load_callbacks, overridden

NOTES = "notes.jsonl"  # in the folder of the checkpoints' parent


class Notes(Callback):
    """Writes what it is told beside the checkpoints."""

    def __init__(self):
        self.calls: list = []

    def on_step_begin(self, step: int) -> None:
        self.calls.append(["begin", step])

    def on_step(self, record: StepRecord) -> None:
        self.calls.append(["step", record["step"], record["loss"]])

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        self.calls.append(["evaluate", step, figures["loss"]])

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        assert (checkpoint.path / "manifest.json").exists()
        lines = [*self.calls, ["save", checkpoint.step, int(os.environ["RANK"])]]
        (checkpoint.path.parents[1] / NOTES).write_text("".join(json.dumps(line) + "\n" for line in lines))


class BrokenAtStep4(Callback):
    """Fails in the thread that writes a checkpoint."""

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        if checkpoint.step == 4:
            raise KeyError("format")


class Failing(Callback):
    """Cannot be made."""

    def __init__(self):
        raise OSError("no network")


def test_a_runs_callbacks_are_told_of_steps_evaluations_and_checkpoints(pools, tmp_path):
    how = {"model": "mlp", "data": "digits", "steps": 4, "eval_every": 2, "save_every": "4"}
    run = pools(2).train(tmp_path / "run", callbacks=[f"{__name__}:Notes"], **how)
    calls = [json.loads(line) for line in (tmp_path / "run" / NOTES).read_text().splitlines()]
    assert [call[1] for call in calls if call[0] == "begin"] == [0, 1, 2, 3]
    assert [call[1:] for call in calls if call[0] == "step"] == [[s["step"], s["loss"]] for s in run.steps]
    evaluated = [call for call in calls if call[0] == "evaluate"]
    assert [call[1] for call in evaluated] == [2, 4]
    assert evaluated[-1][2] == run.result["eval"]["loss"]
    assert calls[-1] == ["save", 4, 0]
    assert calls.index(evaluated[0]) > [call[:2] for call in calls].index(["step", 2])


def test_an_exception_in_the_thread_that_saves_is_told(pools, tmp_path):
    """Whatever is raised there, OSError or not, an event says so, and training goes on."""
    how = {"model": "mlp", "data": "digits", "steps": 8, "save_every": "4", "save_async": True}
    run = pools(2).train(tmp_path / "run", callbacks=[f"{__name__}:BrokenAtStep4"], **how)
    assert run.result["steps"] == 8
    events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    (failed,) = (e for e in events if e["event"] == "save-failed")
    assert failed["step"] == 4
    assert "KeyError: 'format'" in failed["text"]


def test_all_callbacks_that_cannot_be_made_are_named_at_once():
    names = ["no.such:Thing", f"{__name__}:Failing", "pathlib:Path", f"{__name__}:Notes"]
    with pytest.raises(UserError) as caught:
        load_callbacks(names)
    messages = [p.message for p in caught.value.problems]
    assert len(messages) == 3
    assert "no.such:Thing" in messages[0]
    assert "no network" in messages[1]
    assert "not a Callback" in messages[2]
    assert isinstance(load_callbacks(names[3:])[0], Notes)


def test_what_nobody_overrides_is_not_called():
    class Saves(Callback):
        def on_save(self, checkpoint: SavedCheckpoint) -> None:
            assert checkpoint.path == Path("here")

    one = Saves()
    assert overridden([Callback(), one], "on_step") == []
    assert overridden([Callback(), one], "on_save") == [one.on_save]
