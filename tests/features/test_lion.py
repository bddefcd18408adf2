"""Lion trains as its formula does, needs what is counted by hand, and plan forecasts what is simulated."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.simulate.targets import PARAMETERS, TINY, target
from tests.train import reference
from tests.train.reference import Plan, follow, relative_difference, text_windows, write_corpus
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.spec.devices import find_device
from zerofit.spec.overhead import blas_workspace_bytes

STEPS, SEQ_LEN, LR, DECAY = 10, 32, 1e-3, 0.1
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its Lion for CPUs")


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2, in float64: the sign of a mean of gradient and moment is the step.

    DeepSpeed's op for CPUs takes the sign of 0 as positive (ops/csrc/lion/cpu_lion_impl.cpp, copysignf).
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.float64))
                gradient = p.grad.double()
                sign = torch.copysign(torch.ones_like(moment), 0.9 * moment + 0.1 * gradient)
                update = sign + group["weight_decay"] * p.double()
                p.copy_(p.double() - group["lr"] * update)
                moment.mul_(0.99).add_(gradient, alpha=0.01)


def formula(plan: Plan, model: torch.nn.Module) -> Lion:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return Lion([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], {"lr": LR})


@compiled
@pytest.mark.parametrize("layout", ["zero0", "zero2", "zero3_offload"])
def test_losses_are_those_of_the_formula(pools, tmp_path, monkeypatch, layout):
    corpus = write_corpus(tmp_path / "text.txt")
    count, windows = text_windows(corpus, SEQ_LEN)
    plan = Plan("llama-tiny", TextInputs(vocab_size=260, seq_len=SEQ_LEN), LLAMA, windows, count, 8, steps=STEPS)
    monkeypatch.setattr(reference, "_optimizer", formula)
    losses, norms, weights = follow(plan)
    asked = {"model": "llama-tiny", "model_args": LLAMA, "data": f"text:{corpus}", "seq_len": SEQ_LEN, "lr": LR}
    how = {"steps": STEPS, "schedule": "constant", "warmup_steps": 0, "eval_samples": 8, "global_batch": 8}
    trained = pools(2).train(tmp_path / "run", **asked, **how, optimizer="lion", ds_config=layout)
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-4)
    np.testing.assert_allclose([step["grad_norm"] for step in trained.steps], norms, rtol=1e-3)
    assert losses[-1] < 0.95 * losses[0]
    ours = load_file(Path(trained.folder.model) / "model.safetensors")
    assert relative_difference(ours, weights) < 1e-3  # a moment of almost 0 may have the other sign


CASES: dict[str, dict[str, Any]] = {
    "zero0": {"config": "zero0", "precision": "bf16"},
    "zero2": {"config": "zero2", "precision": "bf16"},
    "zero3 offloaded": {"config": "zero3_offload", "precision": "bf16"},
    "cpu zero3": {"config": "zero3", "kind": "cpu"},
}


def test_states_are_counted_by_hand_and_forecast():
    targets = [target(**{"kind": "h100-80gb", "optimizer": "lion", **case}) for case in CASES.values()]
    records: dict[str, Any] = dict(zip(CASES, simulate_all(targets, lambda text: None), strict=True))
    for name, one in zip(CASES, targets, strict=True):
        peak, share = records[name].peaks[0], 1 if "zero0" in name else 2
        numbers = 2 if "cpu" in name else 1  # DeepSpeed's Lion for CPUs also allocates Adam's second moment
        if "offloaded" not in name:
            counted = 4 * numbers * PARAMETERS // share
            assert peak.breakdown["optimizer state"] == pytest.approx(counted, abs=1024), name
        workspace = 0 if one.accelerator == "cpu" else blas_workspace_bytes(find_device("h100-80gb"))
        setting = [TraceSetting(one.job.precision)]
        inputs = TextInputs(vocab_size=TINY["vocab_size"], seq_len=16)
        profile = profile_model(find("llama-tiny"), "causal-lm", inputs, TINY, setting, one.accelerator)
        planned = Forecaster(profile, one.accelerator, workspace).memory(PlannedLayout.of(one.job))
        assert planned.peak_bytes == pytest.approx(peak.bytes, rel=0.04), name
