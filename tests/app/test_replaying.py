"""`zerofit replay` before its ranks start: the step, the job on one CPU, and folders that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofit.app.replaying import _failed_step, _job, _losses, _start_before, replay
from zerofit.cli.main import main
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Batch, Job, Layout, RunFolder, Start

FACTS = ModelFacts(task="image", parameters=10, largest_parameter=10, hidden_size=3, forward_flops=None)


def run_folder(path: Path, **settings) -> RunFolder:
    folder = RunFolder(path)
    folder.logs.mkdir(parents=True)
    job = Job(
        run=Run(**{"model": "lenet", "data": "digits", "callbacks": ("mine:Watch",), "precision": "fp16"} | settings),
        layout=Layout(dp=2, tp=2, zero_stage=1),
        batch=Batch(micro=6, accumulation=2, dp=2),
        steps=9,
        facts=FACTS,
        ds_config={"fp16": {"enabled": True}, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}},
    )
    job.write(folder, job.ds_config)
    return folder


def step_of(folder: RunFolder) -> int:
    return _failed_step(folder, _losses(folder), Job.read(folder))


def test_the_step_is_that_of_the_error_or_where_the_loss_rose(tmp_path):
    folder = run_folder(tmp_path)
    assert step_of(folder) == 1
    lines = [{"step": n + 1, "loss": loss} for n, loss in enumerate([2.0, 1.0, 1.5, 3.5, 90.0])]
    strange = ["[]", "{", '{"step": 1e999, "loss": 1}', '{"step": "x", "loss": null}']
    folder.metrics.write_text("\n".join([*map(json.dumps, lines[:3]), *strange]) + "\n")
    assert step_of(folder) == 4  # all are healthy: the one after the last
    folder.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert step_of(folder) == 4  # more than three times the lowest
    problem = {"kind": "nan-loss", "message": "the loss of step 7 is nan", "where": "step 7"}
    folder.rank_error(1).write_text(json.dumps({"problems": [problem]}))
    folder.rank_error(0).write_text("[1")
    assert step_of(folder) == 7


def test_one_cpu_takes_the_same_global_batch_without_zero(tmp_path):
    job = Job.read(run_folder(tmp_path))
    alone = _job(job, None, 5, "fp64")
    assert (alone.batch.total, alone.layout.world_size) == (job.batch.total, 1)
    assert alone.ds_config["train_batch_size"] == 24
    assert alone.ds_config["zero_optimization"] == {"stage": 0} and "fp16" not in alone.ds_config
    assert alone.replay and alone.replay.double and alone.run.precision == "fp32"
    same = _job(job, None, 5, None)
    assert (same.layout, same.batch, same.ds_config) == (job.layout, job.batch, job.ds_config)
    assert same.run.callbacks == () and same.run.check_loss


def test_a_run_that_was_resumed_is_replayed_from_its_first_start(tmp_path):
    """The same command on a finished run, too, leaves the start at its last step in plan.json."""
    folder = run_folder(tmp_path)
    resumed = Start(checkpoint=str(tmp_path / "step-00000005"), step=5, samples=120, same_layout=True)
    job = replace(Job.read(folder), start=resumed)
    assert _start_before(5, folder, job, {1: 2.0, 6: 1.0}, Reporter()) is None
    assert _start_before(6, folder, job, {1: 2.0, 6: 1.0}, Reporter()) is resumed
    with pytest.raises(UserError, match="the run started at step 5, and has no checkpoint before step 5"):
        _start_before(5, folder, job, {6: 1.0}, Reporter())  # from a checkpoint of another run


def test_folders_and_steps_that_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a zerofit run folder: plan\.json is missing"):
        replay(tmp_path)
    folder = run_folder(tmp_path / "run")
    with pytest.raises(UserError, match="--step 10: the run has 9 steps"):
        replay(folder.path, 10)
    named = run_folder(tmp_path / "named", model="mine:Net")
    with pytest.raises(UserError, match="module mine, call Net"):
        replay(named.path)
    folder.plan.write_text("[]")
    done = CliRunner().invoke(main, ["replay", str(folder.path)])
    assert done.exit_code == 2 and "Traceback" not in done.output
