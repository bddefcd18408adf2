"""What is simulated against what real ranks allocate, on a few of the benchmark's configurations."""

from __future__ import annotations

import shutil
import statistics
from typing import Any

import pytest

from benchmarks.meter.comparison import compare
from benchmarks.meter.configurations import MODELS, target
from benchmarks.meter.pool import Ranks
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator meter is compiled with g++")

CONFIGURATIONS = (
    "llama zero3 bf16 mb2 ckpt x2",
    "gpt2 zero1 bf16 mb2 ckpt offload x2",
    "lenet zero3 fp32 mb2 ga2 ckpt x2",
    "bert zero1 bf16 mb2 pp2 x2",
    "t5 zero3 bf16 mb2 ckpt x2",
    "whisper zero2 bf16 mb2 x2",
    "clip zero3 fp32 mb2 x2",
    "llava zero2 bf16 mb2 ckpt x2",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_simulated_peaks_are_the_real_ones(name, ranks):
    errors = [abs(error) for error in compare(name, target(name), ranks).errors("with_kernels")]
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01


@pytest.mark.parametrize("name", ["llama zero2 bf16 mb2 x2", "llama zero3 bf16 mb2 x2", "llama zero1 bf16 mb2 pp2 x2"])
def test_peaks_from_a_pretrained_folder(name, ranks, tmp_path):
    model = MODELS["llama"]
    source, inputs = find(model["model"]), TextInputs(vocab_size=2048, seq_len=model["seq_len"])
    weights: Any = build(source, inputs, model["model_args"])
    weights.bfloat16().save_pretrained(tmp_path)
    pretrained = {"llama": {"model": str(tmp_path), "seq_len": model["seq_len"], "tokenizer": "bytes"}}
    found = compare(name, target(name, pretrained), ranks)
    errors = found.errors("with_kernels")
    assert max(abs(error) for error in errors) <= 0.001
