"""`zerofit tune`: real trials, some of which fail; killed, it goes on; what it writes is a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from zerofit.app.job.requests import read_request
from zerofit.app.job.resolve import resolve_job
from zerofit.cli.main import main

MINE = """
import os, signal, time, torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        if len(x) == 8 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.training:
            time.sleep(0.1)  # most of a step, whatever else the machine does: its time is soon known well enough
        return super().forward(x.flatten(1))
"""
SPACE = {"zero_stage": [1], "pp": [1], "tp": [1], "sp": [1], "overlap_comm": False, "micro_batch": [2, 8]}
SPACE |= {"activation_checkpointing": False}


def said(*args: str):
    """The exit code, the answer and the messages of a command; only its ranks are processes of their own."""
    done = CliRunner().invoke(main, [*args, "--json"])
    lines = done.stdout.strip().splitlines()
    return done.exit_code, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.usefixtures("short_trials")
def test_failing_trials_are_results_and_the_winner_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tune = ("tune", "run.yaml", "--space", "space.yaml", "--output", "tuned")
    (tmp_path / "tuned_net.py").write_text(MINE)
    (tmp_path / "yaml.py").write_text("raise ImportError")  # a user's file is not part of zerofit
    (tmp_path / "run.yaml").write_text("model: tuned_net:Net\ndata: digits\nglobal_batch: 16\nlr: 1.0e-2\nsteps: 4\n")
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    code, answer, err = said(*tune, "--minutes", "20")
    assert code == 0, err
    status = {row["micro_batch"]: row["status"] for row in answer["trials"]}
    assert status == {8: "crash", 2: "ok"}  # the planner's favourite is tried first
    (crash,) = [row["reason"] for row in answer["trials"] if row["status"] == "crash"]
    assert "rank 1 on localhost was killed (SIGKILL)" in crash
    assert answer["best"]["micro_batch"] == 2
    assert answer["best"]["step_s"] > 0
    assert answer["regret"]["gap"] == 0.0 or answer["regret"]["untried"]
    assert {Path(path).name for path in answer["written"]} == {
        "ds_config.json",
        "run.yaml",
        "trials.json",
        "trials.png",
    }
    assert yaml.safe_load((tmp_path / "tuned" / "run.yaml").read_text())["ds_config"] == "ds_config.json"

    code, again, err = said(*tune)  # as a tuner that was killed at its end
    assert code == 0, err
    assert f"found {len(answer['trials'])} earlier trials of this run" in err
    assert [row["measured_step_s"] for row in again["trials"]] == [row["measured_step_s"] for row in answer["trials"]]

    job = resolve_job(read_request("tuned/run.yaml", {})).job
    config = job.ds_config
    assert (job.steps, job.batch.total) == (4, 16)
    assert (config["train_micro_batch_size_per_gpu"], config["zero_optimization"]["stage"]) == (2, 1)


def test_a_space_that_names_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: mlp\ndata: digits\n")
    (tmp_path / "space.yaml").write_text("zero_stge: [1]\nmicro_batch: 4\nspeed: 9\n")
    done = CliRunner().invoke(main, ["tune", "run.yaml", "--space", "space.yaml", "--json"])
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 2
    assert [p["kind"] for p in answer["errors"]] == ["unknown-key", "unknown-key"]
    assert "zero_stage" in answer["errors"][0]["hint"]
