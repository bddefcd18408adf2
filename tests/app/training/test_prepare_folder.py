"""What a start finds in a folder that an earlier one was killed in."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from zerofit.app.training import prepare_folder
from zerofit.app.training.prepare_folder import find_folder, make_ready
from zerofit.app.training.train import prepare
from zerofit.launch.run_lock import CommandLock, held
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run, load_run
from zerofit.spec.run_folder import RunFolder, Start

MLP = {"model": "mlp", "data": "digits", "ranks": 1}


def test_a_command_that_comes_second_writes_nothing_into_the_folder(tmp_path, monkeypatch):
    """Both found the folder free, and the first has locked it while the second forecast its memory."""
    folder = RunFolder(tmp_path / "run")

    def prepared(**options) -> None:
        with ExitStack() as stack:
            request = load_run(None, {**MLP, "output": folder.path, **options})
            prepare(request, Reporter(), lock=CommandLock(stack, print))

    prepared(steps=5)
    written = {path: path.read_text() for path in folder.path.glob("*.json")}
    assert len(written) == 5
    monkeypatch.setattr(prepare_folder, "refuse_if_held", lambda folder: None)
    monkeypatch.setattr("zerofit.launch.run_lock.PROBE_S", 0.0)
    folder.launch_spec.write_text("of a killed start")
    with held(folder, print), pytest.raises(UserError, match="another zerofit is using"):
        assert not folder.launch_spec.exists()
        prepared(steps=9)
    assert {path: path.read_text() for path in folder.path.glob("*.json")} == written
    prepared(steps=9)
    assert json.loads(folder.plan.read_text())["steps"] == 9


def test_a_start_that_was_killed_before_its_plan_was_written_is_no_other_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    run = Run(**MLP, output=folder.path)
    folder.logs.mkdir(parents=True)
    for path in (folder.lock, folder.run, folder.profile, folder.path / ".plan.json.0a1b2c3d"):
        path.touch()
    assert find_folder(run) == folder
    (folder.path / "notes.txt").touch()
    with pytest.raises(UserError, match="contains another run"):
        find_folder(run)


def test_runs_that_start_in_the_same_second_have_their_own_folders():
    assert len({find_folder(Run(**MLP)).path for _ in range(5)}) == 5


def test_leftovers_of_a_killed_start_are_cleared_and_undone_records_kept(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.model_parts.mkdir()
    (folder.model_parts / "stage-0.safetensors").write_bytes(bytes(1000))  # killed while it saved a pipeline's model
    for path in (folder.stop_request, folder.stopped, folder.logs / "rank-0.error.json", folder.result):
        path.write_text("{}")
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    start = Start(checkpoint="checkpoints/step-00000002", step=2, samples=32, same_layout=True)
    notes = make_ready(folder, start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "metrics.jsonl"]
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert (folder.logs / "metrics-undone-1.jsonl").read_text() == lines[2] + '{"step": 4, "lo'
    assert notes == ["moved 2 records of steps after step 2 to logs/metrics-undone-1.jsonl"]
