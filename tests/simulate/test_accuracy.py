"""What is simulated against what real ranks allocate, on a few of the benchmark's configurations."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.meter import configurations
from benchmarks.meter.comparison import compare
from benchmarks.meter.configurations import MODELS
from benchmarks.meter.pool import Ranks
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs, are_packed
from zerofit.simulate.record import SimulationTarget

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator meter is compiled with g++")

CONFIGURATIONS = (
    "llama zero3 bf16 mb2 ckpt x2",
    "llama zero3 bf16 mb2 chunk tiles hosted x2",
    "gpt2 zero1 bf16 mb2 ckpt offload x2",
    "gpt2 zero3 fp32 mb2 ga2 offload-all x2",  # the head that the embedding's weights replace is given back
    "mamba zero2 bf16 mb2 x2",  # gradients are added up in place
    "lenet zero3 fp32 mb2 ga2 ckpt x2",
    "bert zero1 bf16 mb2 pp2 x2",
    "t5 zero3 bf16 mb2 ckpt x2",
    "whisper zero2 bf16 mb2 x2",
    "clip zero3 fp32 mb2 x2",
    "llava zero2 bf16 mb2 ckpt x2",
    "llama-lora zero3 bf16 mb2 ckpt x2",
    "gpt2-lora zero2 bf16 mb8 ckpt x2",
    "llama-qlora zero2 bf16 mb2 ckpt x2",
    "llama-qlora zero3 bf16 mb2 ckpt offload-all x2",
    "llama zero0 bf16 mb2 adamw8bit x2",
    "llama zero3 fp32 mb2 adamw8bit x2",
    "llama zero0 fp32 mb2 adafactor x2",
)


def target(*asked: Any) -> SimulationTarget:
    """Return the first rank of a configuration, for a first step and one like all that follow."""
    return replace(configurations.target(*asked), steps=2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_simulated_peaks_are_the_real_ones(name, ranks):
    if "qlora" in name or "8bit" in name:
        pytest.importorskip("bitsandbytes")
    errors = [abs(error) for error in compare(name, target(name), ranks).errors("with_kernels")]
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01


def test_the_answer_is_the_largest_real_rank(ranks):
    """Of two, the second has the head and the last layers, whose gradients come first."""
    name = "llama-deep zero2 fp32 mb2 overlap buckets x2"
    found = compare(name, target(name), ranks)
    real = [max(peak.real_bytes for peak in found.peaks if peak.rank == rank) for rank in range(2)]
    assert found.answered_rank == found.highest.rank == real.index(max(real))
    assert max(real) > 1.01 * min(real)
    assert max(abs(error) for error in found.errors("answered")) <= 0.001


@pytest.mark.parametrize("name", ["mixtral zero2 fp32 mb2 ep2 x2", "mixtral zero3 bf16 mb2 ckpt sp2 ep2 x2"])
def test_simulated_peaks_of_spread_experts_are_the_real_ones(name, ranks):
    """Where each expert gets as many tokens as any other; and plan's."""
    found = compare(name, target(name), ranks)
    errors = [abs(error) for error in found.errors("with_kernels")]
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01
    assert abs(found.worst("planned")) <= 0.05


def test_simulated_peaks_of_experts_in_a_pipeline_are_the_real_ones(ranks):
    """Of every rank, with the loss of the routers of both stages; and plan's."""
    name = "mixtral zero1 bf16 mb2 ga2 ckpt pp2 ep2 x4"
    found = compare(name, target(name), ranks)
    assert max(abs(error) for error in found.errors("with_kernels")) <= 0.001
    assert abs(found.worst("planned")) <= 0.01


def test_simulated_peaks_of_dualpipev_are_the_real_ones(ranks):
    """And plan's, which are of the stage that needs most."""
    name = "llama zero1 bf16 mb2 ckpt dualpipev pp2 x2"
    found = compare(name, target(name), ranks)
    errors = [abs(error) for error in found.errors("with_kernels")]
    assert len(errors) == 4  # both stages, two steps
    assert max(errors) <= 0.001
    assert abs(found.worst("planned")) <= 0.01


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


def test_packed_conversations_take_a_mask(ranks, tmp_path):
    turns = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "A little more. " * 6}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    name, chats = "llama zero2 bf16 mb2 x2", {"llama": {**MODELS["llama"], "data": f"jsonl:{tmp_path}/chats.jsonl"}}
    asked = target(name, chats)
    assert are_packed(asked.inputs)
    found = compare(name, asked, ranks)
    assert max(abs(error) for error in found.errors("with_kernels")) <= 0.001
    assert abs(found.worst("planned")) <= 0.02
