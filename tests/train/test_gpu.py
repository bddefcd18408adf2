"""What only a CUDA device can show."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zerofit.app.explaining import explain
from zerofit.config.ds_json import read_for_run

pytestmark = pytest.mark.gpu

TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
HOW = {"model": "llama-tiny", "model_args": TINY, "data": "synthetic", "seq_len": 64, "steps": 60}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_trains_through_a_forced_overflow(pools, tmp_path, stage):
    config = read_for_run(f"zero{stage}").config
    config["fp16"] = {"initial_scale_power": 32, "hysteresis": 1}  # gradients of a loss scaled by 2**32 overflow
    trained = pools(1).train(tmp_path / "run", **HOW, precision="fp16", ds_config=config)
    first, last = trained.steps[0], trained.steps[-1]
    assert first["skipped_steps"] >= 1
    assert last["loss_scale"] < 2**32
    assert last["skipped_steps"] < 30
    assert last["loss"] < first["loss"] - 0.5
    assert np.isfinite(trained.losses).all()


def test_the_last_allocations_before_an_out_of_memory_are_recorded(pools, tmp_path):
    how = HOW | {"seq_len": 4096, "micro_batch": 4096, "record_memory": True}
    with pytest.raises(AssertionError, match="out of memory"):
        pools(1).train(tmp_path / "run", **how)
    found = explain(tmp_path / "run")
    assert found.is_known and found.alive and found.lines


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_learns_and_knows_its_peak(pools, tmp_path, precision):
    trained = pools(1).train(tmp_path / "run", **HOW, precision=precision)
    assert json.loads(trained.folder.env.read_text())["accelerator"] == "cuda"
    assert trained.losses[-1] < trained.losses[0] - 0.5
    assert trained.steps[-1]["mfu"] is None or 0 < trained.steps[-1]["mfu"] < 1


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_offload_with_deepspeeds_own_adam(pools, tmp_path, name):
    trained = pools(1).train(tmp_path / "run", **HOW, precision="bf16", ds_config=name)
    assert trained.losses[-1] < trained.losses[0] - 0.5
