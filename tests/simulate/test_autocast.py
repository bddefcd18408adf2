"""Autocast of the simulated device against torch's own kernels for CUDA devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulate.targets import target
from zerofit.simulate.fakes.autocast import policies
from zerofit.simulate.forecast.processes import simulate_all

# registered for CUDA in autocast_mode.cpp itself: cuDNN's ops, which nothing here comes to, one that raises, and one
# that no torch has
BESIDE = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "binary_cross_entropy"}
BESIDE |= {"linalg_matrix_sqrth"}


@pytest.mark.versions(of="torch")
def test_the_list_is_the_installed_torchs():
    names: list[str] = torch._C._dispatch_get_all_op_names()
    aten = [name for name in names if name.startswith("aten::")]
    kernels = {name for name in aten if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")}
    assert kernels - {f"aten::{name}" for name in BESIDE} == set(policies())


@pytest.mark.versions(of="torch")
def test_types_and_casts_are_those_of_cuda():
    script = Path(__file__).with_name("autocast_calls.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script, "simgpu", "cuda"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    simulated, real = map(json.loads, done.stdout.splitlines()[-2:])
    assert simulated == real


@pytest.mark.versions
def test_a_simulated_gpu_keeps_what_autocast_casts(cache: Any):
    """At ZeRO 0: weights of linear layers in bf16, beside the float32 ones."""
    config = {"zero_optimization": {"stage": 0}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    wide = {"model": "llama-tiny", "seq_len": 16, "model_args": {"hidden_size": 256, "num_hidden_layers": 2}}
    plain = target({"zero_optimization": {"stage": 0}}, kind="a100-80gb", **wide)
    cast = target(config, kind="a100-80gb", **wide)
    before, after = simulate_all([plain, cast], lambda text: None)
    kinds = [max(peak.breakdown.get("activations", 0) for peak in one.peaks) for one in (before, after)]
    # 32 tokens are nothing beside the weights, of which a bf16 copy is kept for backward
    products = plain.job.facts.parameters - 2 * plain.job.facts.largest_parameter
    assert kinds[1] - kinds[0] == pytest.approx(2 * products, rel=0.2)
