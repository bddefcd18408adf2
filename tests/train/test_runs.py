"""What a run does besides agreeing with plain PyTorch: it learns, watches, stops, and takes users' own models."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from tests.train.own_models import OwnLoss, fingerprint
from tests.train.reference import Plan, sample_order
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.stages import stages_of


@pytest.fixture(scope="module")
def digits():
    return open_data(Run(data="digits"), "image", None, Reporter())


def test_lenet_learns_digits(pools, tmp_path):
    how = {"data": "digits", "epochs": 8, "eval_samples": None}
    trained = pools(2).train(tmp_path / "run", model="lenet", **how)
    assert trained.result["eval"]["accuracy"] >= 0.9  # 0.983 after 20 epochs
    assert [s["step"] for s in trained.steps] == list(range(1, trained.job.steps + 1))
    assert trained.job.steps == math.ceil(8 * len(open_data(Run(), "image", None, Reporter()).train) / 16)


@pytest.mark.parametrize(("every", "stopped_at"), [(1, 1), (0, 2)])
def test_a_request_to_stop_ends_an_evaluation(pools, tmp_path, every, stopped_at):
    """Of the first step or of the last one; the run goes on from the checkpoint, and evaluates."""
    request = RunFolder(tmp_path / "run").stop_request
    how = {"model": "tests.train.own_models:StopRequested", "model_args": {"request": str(request)}, "data": "digits"}
    how |= {"steps": 2, "eval_every": every, "micro_batch": 1, "loss": "cross-entropy"}
    stopped = pools(2).train(tmp_path / "run", **how)
    assert json.loads(stopped.folder.stopped.read_text()) == {"step": stopped_at, "steps": 2}
    assert not stopped.folder.result.exists()
    checkpoint = stopped.folder.checkpoints / f"step-{stopped_at:08}"
    resumed = pools(2).train(tmp_path / "resumed", **how, resume=str(checkpoint))
    assert resumed.result["eval"]["loss"] > 0
    assert resumed.result["resumed_from"] == str(checkpoint)


@pytest.mark.parametrize("balance", ["parameters", "time"])
def test_the_map_of_a_pipeline_is_what_its_ranks_hold(pools, tmp_path, digits, balance):
    how = {"pipeline": "auto", "pipeline_balance": balance, "micro_batch": 4, "steps": 1, "save_every": "1"}
    trained = pools(2).train(tmp_path / "run", model="lenet", data="digits", **how)
    stages, sizes = trained.result["stages"], dict(build(find("lenet"), digits.inputs, {}).named_parameters())
    assert [stage["ranks"] for stage in stages] == [[0], [1]]
    if balance == "parameters":
        assert stages == json.loads(json.dumps([asdict(stage) for stage in stages_of(trained.job)]))
    else:
        assert '"event": "stages"' in trained.folder.events.read_text()
    for stage in stages:
        file = trained.folder.checkpoints / "step-00000001" / "ranks" / f"rank-{stage['stage']:05}.json"
        held = json.loads(file.read_text())["engines"]["state"]["names"]
        assert {name.partition(".")[0] for name in held} == set(*stage["parts"])
        assert stage["parameters"] == sum(sizes[name].numel() for name in held)


def test_the_saved_model_has_the_accuracy_that_was_reported(pools, tmp_path, digits):
    how = {"data": "digits", "steps": 12, "ds_config": "zero3", "eval_samples": None, "model_args": {"width": 16}}
    trained = pools(2).train(tmp_path / "run", model="resnet18-small", **how)
    model = build(find("resnet18-small"), digits.inputs, {"width": 16}).eval()
    file = trained.folder.model / "model.safetensors"
    assert file.stat().st_mode == (trained.folder.path / "run.json").stat().st_mode  # others may read it as the rest
    model.load_state_dict(load_file(file))
    batch = digits.valid.batch(range(len(digits.valid)), range(len(digits.valid)))
    with torch.no_grad():
        logits = model(batch["inputs"])
    right = (logits.argmax(1) == batch["labels"]).float().mean().item()
    assert trained.result["eval"]["accuracy"] == pytest.approx(right, abs=1e-6)
    loss = functional.cross_entropy(logits, batch["labels"]).item()
    assert trained.result["eval"]["loss"] == pytest.approx(loss, rel=1e-4)


def test_evaluation_is_the_same_on_any_layout(pools, tmp_path):
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    how = {"model": "llama-tiny", "model_args": tiny, "data": "synthetic", "seq_len": 32, "steps": 2, "global_batch": 8}
    how |= {"eval_samples": 13, "schedule": "constant", "warmup_steps": 0}
    layouts = [{}, {"pipeline": 2}, {"tensor_parallel": 2}, {"sequence_parallel": 2}]
    losses = [
        pools(2).train(tmp_path / str(n), **how, **layout).result["eval"]["loss"] for n, layout in enumerate(layouts)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.versions(of="deepspeed")
def test_dcgan_trains_both_networks_on_all_ranks_alike(pools, tmp_path):
    # the run fails where check_replicas finds a parameter whose sum is not the same on all ranks
    trained = pools(2).train(tmp_path / "run", model="dcgan", data="digits", epochs=1.2, global_batch=64, lr=2e-4)
    first, last = trained.steps[0], trained.steps[-1]
    for name in ("loss_d", "loss_g"):
        assert math.isfinite(last[name])
        assert abs(last[name] - first[name]) > 1e-3
    torch.manual_seed(0)
    before = build(find("dcgan"), ImageInputs(channels=1, size=8, classes=10), {}).state_dict()
    after = load_file(trained.folder.model / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.partition(".")[0] for name in changed} == {"generator", "discriminator"}
    assert all(name in changed for name, tensor in before.items() if name.endswith("weight") and tensor.ndim == 4)
    assert (trained.folder.path / "drawings.png").stat().st_size > 0
    assert [file.name for file in (trained.folder.path / "drawings").iterdir()] == ["epoch-001.png"]


def test_a_table_is_learned_and_the_saved_model_is_judged_alike(pools, tmp_path):
    rows = np.random.default_rng(0).normal(size=(300, 3))
    kinds = np.where(rows[:, 0] > 0.3, "oak", np.where(rows[:, 1] > 0, "elm", "ash"))
    lines = [f"{a},{b},{c},{kind}\n" for (a, b, c), kind in zip(rows, kinds, strict=True)]
    (tmp_path / "trees.csv").write_text("a,b,c,kind\n" + "".join(lines))
    data = f"csv:{tmp_path}/trees.csv"
    trained = pools(2).train(
        tmp_path / "run", model="mlp-table", data=data, epochs=5, micro_batch=8, lr=3e-2, eval_samples=60
    )
    valid = open_data(Run(data=data), "table", None, Reporter()).valid
    batch = valid.batch(range(len(valid)), range(len(valid)))
    w = load_file(trained.folder.model / "model.safetensors")
    hidden = (batch["inputs"] @ w["hidden.0.weight"].t() + w["hidden.0.bias"]).relu()
    logits = hidden @ w["head.weight"].t() + w["head.bias"]
    right = (logits.argmax(1) == batch["labels"]).double().mean().item()
    assert trained.result["eval"]["accuracy"] == pytest.approx(right)
    assert right > 0.85


def test_nan_stops_the_run_and_names_the_sample(pools, tmp_path, digits):
    plan = Plan("", digits.inputs, {}, None, len(digits.train), global_batch=16)
    culprit = int(sample_order(plan, range(64, 80))[5])  # in the fifth step
    poison = fingerprint(digits.train.batch([culprit], [0])["inputs"]).item()
    how = {"model": "tests.train.own_models:Exploding", "model_args": {"poison": poison}, "data": "digits"}
    words = pools(2).fail(tmp_path / "run", **how, steps=20, micro_batch=4, gradient_accumulation_steps=2)
    for word in words:
        assert word["kind"] == "nan-loss"
        assert "the loss of step 5 is nan" in word["message"]
        assert f"{culprit}" in word["message"].partition("sample indices")[2].partition(";")[0]
        assert "the last good step was 4, loss 2." in word["message"]
        assert "--lr" in word["hint"]


def test_a_model_with_its_own_loss(pools, tmp_path, digits):
    how = {"optimizer": "sgd", "lr": 0.1, "schedule": "constant", "warmup_steps": 0, "gradient_clipping": 0.0}
    how |= {"model": "tests.train.own_models:OwnLoss", "model_args": {"width": 8}, "data": "digits", "steps": 5}
    trained = pools(2).train(tmp_path / "run", **how)
    plan = Plan("", digits.inputs, {}, None, len(digits.train), global_batch=16)
    torch.manual_seed(0)
    model = OwnLoss(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(5):
        batch = digits.train.batch(sample_order(plan, range(16 * step, 16 * step + 16)), range(16))
        for p in model.parameters():
            decay = 0.01 if p.ndim > 1 else 0.0
            p.grad = decay * p.detach().clone()
        loss = model(batch["inputs"], batch["labels"])["loss"]
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(trained.losses, expected, rtol=1e-5)


def test_a_model_that_gives_more_than_logits(pools, tmp_path):
    trained = pools(2).train(tmp_path / "run", model="tests.train.own_models:Pair", data="digits", steps=40, lr=0.01)
    assert trained.losses[-1] < trained.losses[0] - 0.5


def test_an_own_language_model_learns(pools, tmp_path):
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 500)
    how = {"model": "tests.train.own_models:Bigrams", "data": f"text:{tmp_path}/text.txt", "seq_len": 64, "lr": 0.1}
    trained = pools(2).train(tmp_path / "run", **how, steps=30)
    assert trained.losses[-1] < trained.losses[0] - 1


def test_the_schedule_is_the_one_asked_for(pools, tmp_path):
    how = {"model": "mlp", "data": "digits", "steps": 10, "warmup_steps": 4, "lr": 0.5, "optimizer": "sgd"}
    trained = pools(2).train(tmp_path / "run", schedule="linear", min_lr=0.05, **how)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.425, 0.35, 0.275, 0.2, 0.125]
    np.testing.assert_allclose([s["lr"] for s in trained.steps], expected, rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_learns(pools, tmp_path, stage):
    square = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "num_attention_heads": 4}
    how = {"model": "llama-tiny", "model_args": square, "data": "synthetic", "seq_len": 32, "steps": 30}
    trained = pools(2).train(tmp_path / "run", **how, optimizer="muon", ds_config=f"zero{stage}")
    assert trained.losses[-1] < trained.losses[0] - 0.5


def test_metrics_say_what_was_done(pools, tmp_path):
    how = {"model": "mlp", "data": "digits", "steps": 3, "micro_batch": 4, "gradient_accumulation_steps": 2}
    trained = pools(2).train(tmp_path / "run", **how, tensorboard=True)
    for n, record in enumerate(trained.steps, 1):
        assert (record["step"], record["samples"]) == (n, 16 * n)
        assert record["samples_per_s"] == pytest.approx(16 / record["step_s"])
        assert record["grad_norm"] > 0
        assert record["memory_bytes"] > 2**26
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder.tensorboard))
    events.Reload()
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(trained.losses)
    assert events.Scalars("valid/accuracy")[0].value == pytest.approx(trained.result["eval"]["accuracy"])


def test_run_json_gives_the_same_run_again(pools, tmp_path):
    from zerofit.spec.run import load_run

    first = pools(2).train(tmp_path / "a", model="mlp", data="digits", steps=5)
    again = load_run(first.folder.run, {"output": tmp_path / "b"}).run.model_dump(exclude={"output", "ranks"})
    second = pools(2).train(Path(tmp_path / "b"), **{k: v for k, v in again.items() if v is not None})
    assert second.losses == first.losses
    assert second.folder.ds_config.read_text() == first.folder.ds_config.read_text()


@pytest.mark.slow
def test_a_compiled_model_trains_alike(pools, tmp_path):
    how = {"model": "mlp", "data": "digits", "steps": 4, "seed": 3, "eval_samples": 32}
    plain = pools(1).train(tmp_path / "plain", **how)
    compiled = pools(1).train(tmp_path / "compiled", **how, compile=True)
    np.testing.assert_allclose(
        [s["loss"] for s in compiled.steps], [s["loss"] for s in plain.steps], rtol=1e-4, err_msg="losses"
    )


@pytest.mark.parametrize("model", ["llama-tiny", "resnet18-small"])
def test_checkpointed_activations_may_lie_in_host_memory(pools, tmp_path, model):
    """cpu_checkpointing of DeepSpeed's JSON; what is computed stays the same."""
    how = {"model": model, "steps": 3, "eval_samples": 8, "micro_batch": 2, "lr": 1e-4}
    images = {"data": "digits", "model_args": {"width": 8}}
    how |= {"data": "synthetic", "seq_len": 16} if model == "llama-tiny" else images
    plain = pools(1).train(tmp_path / "plain", **how)
    hosted = pools(1).train(tmp_path / "hosted", **how, ds_config="activation_checkpointing")
    assert hosted.job.run.activation_checkpointing
    np.testing.assert_allclose([s["loss"] for s in hosted.steps], [s["loss"] for s in plain.steps], rtol=1e-5)
