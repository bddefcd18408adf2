"""AdamW of 8 bits and Adafactor train as plain PyTorch on one process does, and go on bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.train.reference import Plan, follow, relative_difference, text_windows, write_corpus
from zerofit.checkpoint.export import export
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem, UserError
from zerofit.train import optimizer
from zerofit.train.optimizer import missing_kernels

STEPS, SEQ_LEN = 10, 32
EXACT = 1e-5  # relative, fp32
ROUNDED = 1e-3  # relative: where blocks of 256 are cut, moments of 8 bits are rounded otherwise
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
RATES = {"adamw8bit": 1e-3, "paged-adamw8bit": 1e-3, "adafactor": 0.01}
LAYOUTS = {
    "8 bits, stage 0": ("adamw8bit", {"ds_config": "zero0"}, EXACT),
    "8 bits, stage 1": ("adamw8bit", {"ds_config": "zero1"}, ROUNDED),
    "8 bits, stage 3": ("adamw8bit", {"ds_config": "zero3"}, ROUNDED),
    "8 bits, pipeline": ("adamw8bit", {"pipeline": 2, "micro_batch": 2, "ds_config": "zero1"}, ROUNDED),
    "paged, stage 2": ("paged-adamw8bit", {"ds_config": "zero2"}, ROUNDED),
    "adafactor": ("adafactor", {"ds_config": "zero0"}, EXACT),
    "adafactor, accumulation": ("adafactor", {"ds_config": "zero0", "micro_batch": 2}, EXACT),
    "adafactor, pipeline": ("adafactor", {"ds_config": "zero0", "pipeline": 2, "micro_batch": 2}, EXACT),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    corpus = write_corpus(tmp_path_factory.mktemp("text") / "text.txt")
    count, windows = text_windows(corpus, SEQ_LEN)
    inputs = TextInputs(vocab_size=260, seq_len=SEQ_LEN)
    made = Plan("llama-tiny", inputs, LLAMA, windows, count, global_batch=8, steps=STEPS)
    made.corpus = corpus  # type: ignore[attr-defined]
    return made


def options(plan: Plan, name: str, **more) -> dict:
    data = {"data": f"text:{plan.corpus}", "seq_len": SEQ_LEN}  # type: ignore[attr-defined]
    how = {"steps": STEPS, "schedule": "constant", "warmup_steps": 0, "eval_samples": 8, "global_batch": 8}
    named = {"optimizer": name, "lr": RATES[name]}
    return {"model": "llama-tiny", "model_args": LLAMA, **data, **how, **named, **more}


@pytest.mark.parametrize("case", LAYOUTS)
def test_losses_are_those_of_the_same_optimizer_in_plain_torch(pools, tmp_path, plan, case):
    name, layout, allowed = LAYOUTS[case]
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    trained = pools(2).train(tmp_path / "run", **options(plan, name, **layout))
    plan.optimizer, plan.lr = name, RATES[name]
    losses, norms, weights = follow(plan)
    np.testing.assert_allclose(trained.losses, losses, rtol=allowed)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=10 * allowed)
    assert losses[-1] < 0.95 * losses[0]
    ours = load_file(Path(trained.folder.model) / "model.safetensors")
    assert relative_difference(ours, weights) < 10 * allowed


KEPT = {
    "8 bits, stage 0": {"optimizer": "adamw8bit", "ds_config": "zero0", "precision": "bf16"},
    "8 bits, stage 2": {"optimizer": "adamw8bit", "ds_config": "zero2", "precision": "bf16"},
    "8 bits, stage 3": {"optimizer": "adamw8bit", "ds_config": "zero3"},
    "adafactor": {"optimizer": "adafactor", "ds_config": "zero0"},
    "adafactor bf16": {"optimizer": "adafactor", "ds_config": "zero0", "precision": "bf16"},
}


@pytest.mark.parametrize("case", KEPT)
def test_a_run_goes_on_bit_for_bit_and_in_its_own_layout_alone(pools, tmp_path, plan, case):
    if "8bit" in KEPT[case]["optimizer"]:
        pytest.importorskip("bitsandbytes")
    how = dict(KEPT[case])
    asked = options(plan, how.pop("optimizer"), **how, save_every="5")
    whole = pools(2).train(tmp_path / "whole", **asked)
    half = whole.folder.checkpoints / "step-00000005"
    went_on = pools(2).train(tmp_path / "on", **asked, resume=str(half))
    assert went_on.losses == whole.losses[5:]
    ours, theirs = (load_file(one.folder.model / "model.safetensors") for one in (went_on, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    exported = load_file(Path(export(half, tmp_path / "exported").out) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in theirs.items()}
    with pytest.raises(UserError) as refused:
        precision = "fp32" if asked.get("precision") == "bf16" else "bf16"
        other = {"precision": precision} if case.startswith("adafactor") else {"ds_config": "zero1"}
        pools(2).train(tmp_path / "other", **{**asked, **other}, resume=str(half))
    assert "optimizer.type in the checkpoint" in json.dumps([one.message for one in refused.value.problems])


def test_what_is_missing_is_said_before_anything_starts(monkeypatch):
    assert "zerofit[quantize]" in missing(monkeypatch, "nowhere_to_be_found").hint
    pytest.importorskip("bitsandbytes")
    assert missing_kernels("adamw8bit", "cpu") is None
    no_kernel = missing_kernels("adamw8bit", "mps")
    assert no_kernel and "has no kernel for mps" in no_kernel.message


def missing(monkeypatch, package: str) -> Problem:
    with monkeypatch.context() as changed:
        changed.setattr(optimizer, "PACKAGE", package)
        found = missing_kernels("adamw8bit", "cpu")
    assert found
    return found
