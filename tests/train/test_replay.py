"""Replays on real ranks: the fault of a run is found again, and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.train.own_models import fingerprint
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.explain.not_finite import Replay, cause_of
from zerofit.spec.events import Reporter
from zerofit.spec.files import read_jsonl
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job, ReplayRequest, RunFolder, Start
from zerofit.train.run import replicas_apart

HOW = {"data": "digits", "steps": 8, "micro_batch": 4, "optimizer": "sgd", "lr": 0.01, "check_loss": True}


def stopped(pools, folder: Path, model: str, **options) -> int:
    """The step before whose update both ranks of a run have stopped."""
    words = pools(2).fail(folder, **HOW | {"model": f"tests.train.nan_models:{model}"} | options)
    assert {word["kind"] for word in words} == {"nan-loss"}
    assert len({word["where"] for word in words}) == 1
    assert all(word["message"].endswith("the optimizer step was not taken") for word in words)
    return int(words[0]["where"].removeprefix("step "))


def replayed(pools, folder: Path, step: int, start: Start | None = None) -> Replay:
    """What both ranks find when they repeat a run up to a step."""
    job, target = Job.read(RunFolder(folder)), RunFolder(folder / "replay")
    target.logs.mkdir(parents=True)
    replace(job, replay=ReplayRequest(step=step), start=start).write(target, job.ds_config)
    assert pools(2)._submit(target) == ["ok", "ok"]
    return cause_of(json.loads(target.result.read_text())["ranks"], [])


def test_a_log_of_zero_in_a_layer_of_zero_3(pools, tmp_path):
    assert stopped(pools, tmp_path / "run", "Logarithm", ds_config="zero3", gradient_accumulation_steps=2) == 1
    found = replayed(pools, tmp_path / "run", 1)
    assert (found.cause, found.step, found.op, found.phase) == ("operation", 1, "log", "forward")
    assert found.module == "Logarithm"
    assert "tests/train/nan_models.py:" in found.line
    assert "zeros" in found.inputs[0]


def test_a_sample_is_named_with_the_losses_of_the_run(pools, tmp_path):
    digits = open_data(Run(data="digits"), "image", None, Reporter())
    culprit = int(Order.of(digits.train, 0).indices(45, 46)[0])  # in the sixth step, on rank 1
    blank = fingerprint(digits.train.batch([culprit], [0])["inputs"]).item()
    how = {"model_args": {"blank": blank}, "ds_config": "zero2", "save_every": 3}
    assert stopped(pools, tmp_path / "run", "Normalising", **how) == 6
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    start = Start(checkpoint=str(checkpoint), step=3, samples=24, same_layout=True)
    found = replayed(pools, tmp_path / "run", 8, start)
    assert (found.cause, found.step, found.samples, found.op, found.rank) == ("sample", 6, (culprit,), "div", 1)
    losses = [
        {row["step"]: row["loss"] for row in read_jsonl(RunFolder(folder).metrics)}
        for folder in (tmp_path / "run", tmp_path / "run" / "replay")
    ]
    assert losses[1] == {step: losses[0][step] for step in (4, 5)}  # bit for bit, dropout included


@pytest.mark.parametrize(
    ("model", "scale", "cause"), [("Wide", 1.0, "fp16-overflow"), ("Plain", 2.0**24, "loss-scale")]
)
def test_overflows_of_fp16(pools, tmp_path, monkeypatch, model, scale, cause):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    config = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": scale}}
    assert stopped(pools, tmp_path / "run", model, ds_config=config, precision="fp16") == 1
    found = replayed(pools, tmp_path / "run", 1)
    assert (found.cause, found.step) == (cause, 1)
    assert found.phase == ("forward" if model == "Wide" else "backward")


def test_a_learning_rate_that_lets_weights_grow(pools, tmp_path):
    how = {"ds_config": "zero0", "lr": 1e6, "gradient_clipping": 0.0}
    step = stopped(pools, tmp_path / "run", "Plain", **how)
    found = replayed(pools, tmp_path / "run", step)
    assert (found.cause, found.step) == ("learning-rate", step)


def test_a_share_of_zero_3_that_overflows_is_no_damaged_copy(pools, tmp_path):
    how = {"ds_config": "zero3", "lr": 1e36, "gradient_clipping": 0.0}
    step = stopped(pools, tmp_path / "run", "Lopsided", **how)
    found = replayed(pools, tmp_path / "run", step)
    assert (found.cause, found.step, found.rank, found.tensor) == ("learning-rate", step - 1, 1, "gain")


def test_equal_replicas_that_are_not_finite_are_not_apart(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **how: None)  # of one rank
    module = torch.nn.Linear(2, 1)
    module.weight.data = torch.tensor([[torch.inf, -torch.inf]])  # their sum is NaN
    job = SimpleNamespace(layout=SimpleNamespace(zero_stage=1))
    engine = SimpleNamespace(seq_data_parallel_group=None)
    assert replicas_apart(SimpleNamespace(job=job, engine=engine, module=module)) == []
