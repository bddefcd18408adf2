"""What is simulated against what real ranks allocate.

`benchmarks/memory_accuracy.py` does it for 200 configurations and all of their ranks. Here are those that test a model
or a feature alone, with two layers and as many ranks as differ.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.meter import configurations
from benchmarks.meter.comparison import compare, peak_bytes
from benchmarks.meter.configurations import MODELS
from benchmarks.meter.pool import Ranks
from zerofit.launch.ops import build_ops
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs, are_packed
from zerofit.simulate.record import SimulationTarget

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator meter is compiled with g++")

CONFIGURATIONS = (
    "llama zero3 bf16 mb2 chunk tiles hosted x2",
    "gpt2 zero1 bf16 mb2 ckpt offload x2",
    "lenet zero3 fp32 mb2 ga2 ckpt x2",
    "bert zero1 bf16 mb2 pp2 x2",
)
MORE_CONFIGURATIONS = (
    "llama-lora zero3 bf16 mb2 ckpt x2",
    "llama zero2 bf16 mb2 lion x2",
    "gpt2 zero3 fp32 mb2 ga2 offload-all x2",  # the head that the embedding's weights replace is given back
    "mamba zero2 bf16 mb2 x2",  # gradients are added up in place
    "t5 zero3 bf16 mb2 ckpt x2",
    "whisper zero2 bf16 mb2 x2",
    "clip zero3 fp32 mb2 x2",
    "llava zero2 bf16 mb2 ckpt x2",
    "gpt2-lora zero2 bf16 mb8 ckpt x2",
    "llama-qlora zero2 bf16 mb2 ckpt x2",
    "llama-qlora zero3 bf16 mb2 ckpt offload-all x2",
    "llama zero0 bf16 mb2 adamw8bit x2",
    "llama zero3 fp32 mb2 adamw8bit x2",
    "llama zero0 fp32 mb2 adafactor x2",
)
LAYERS = {f"{part}_layers" for part in ("num_hidden", "num", "num_decoder", "encoder", "decoder")} | {"n_layer"}
EXPERTS = [
    "mixtral zero2 fp32 mb2 ep2 x2",
    pytest.param("mixtral zero3 bf16 mb2 ckpt sp2 ep2 x2", marks=pytest.mark.slow),
]
PRETRAINED = ["llama zero2 bf16 mb2 x2", "llama zero1 bf16 mb2 pp2 x2"]


def shallow(args: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments with two layers of each part."""
    return {
        key: shallow(value) if isinstance(value, dict) else 2 if key in LAYERS else value for key, value in args.items()
    }


FLAT = ("llama", "mixtral")  # whose number of layers is the catalog's
SHALLOW = {
    name: {
        **model,
        "model_args": shallow(model["model_args"] | ({"num_hidden_layers": 4} if name.startswith(FLAT) else {})),
    }
    for name, model in MODELS.items()
    if "model_args" in model
}


def target(name: str, models: dict[str, dict[str, Any]] = MODELS | SHALLOW) -> SimulationTarget:
    """Return the first rank of a configuration, for a first step and one like all that follow."""
    return replace(configurations.target(name, models), steps=2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def peaks(one: SimulationTarget, ranks: Ranks, of: Sequence[int]) -> tuple[list[float], int]:
    """Return the errors of the steps of these ranks, and the highest peak of all real ranks."""
    real, simulated = ranks.real(one), ranks.simulated(one, of)
    pairs = [(simulated[place], real[rank], step) for place, rank in enumerate(of) for step in range(one.steps)]
    errors = [abs(peak_bytes(ours, step) / peak_bytes(theirs, step) - 1) for ours, theirs, step in pairs]
    return errors, max(peak_bytes(rank, step) for rank in real for step in range(-1, one.steps))


def planned_error(one: SimulationTarget, ranks: Ranks, highest_bytes: int) -> float:
    return abs(ranks.planned(one)["peak_bytes"] / highest_bytes - 1)


@pytest.mark.parametrize(
    "name", [*CONFIGURATIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CONFIGURATIONS)]
)
def test_simulated_peaks_are_the_real_ones(name, ranks):
    """Of the last rank, whose partition is padded; of each stage."""
    if "qlora" in name or "8bit" in name:
        pytest.importorskip("bitsandbytes")
    if "lion" in name:  # or the ranks would compile it, for longer than they wait for each other
        build_ops(["CPULionBuilder"], {**os.environ, "DS_ACCELERATOR": "cpu"}, lambda text: None)
    errors, _ = peaks(target(name), ranks, (0, 1) if "pp2" in name else (1,))
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01


def test_the_answer_is_the_largest_real_rank(ranks):
    """Of two, the second has the head and the last layers, whose gradients come first."""
    name = "llama-deep zero2 fp32 mb2 overlap buckets x2"
    found = compare(name, target(name, MODELS), ranks)
    real = [max(peak.real_bytes for peak in found.peaks if peak.rank == rank) for rank in range(2)]
    assert found.answered_rank == found.highest.rank == real.index(max(real))
    assert max(real) > 1.01 * min(real)
    assert max(abs(error) for error in found.errors("answered")) <= 0.001


@pytest.mark.parametrize("name", EXPERTS)
def test_simulated_peaks_of_spread_experts_are_the_real_ones(name, ranks):
    """Where each expert gets as many tokens as any other; and plan's."""
    one = target(name)
    errors, highest_bytes = peaks(one, ranks, (1,))
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01
    assert planned_error(one, ranks, highest_bytes) <= 0.05


@pytest.mark.slow
def test_simulated_peaks_of_experts_in_a_pipeline_are_the_real_ones(ranks):
    """Of a rank of each stage, with the loss of the routers of both stages; and plan's."""
    one = target("mixtral zero1 bf16 mb2 ga2 ckpt pp2 ep2 x4")
    errors, highest_bytes = peaks(one, ranks, (0, 3))
    assert max(errors) <= 0.001
    assert planned_error(one, ranks, highest_bytes) <= 0.01


@pytest.mark.slow
def test_simulated_peaks_of_dualpipev_are_the_real_ones(ranks):
    """And plan's, which are of the stage that needs most."""
    one = target("llama zero1 bf16 mb2 ckpt dualpipev pp2 x2", MODELS)  # four layers: each stage has two pieces
    errors, highest_bytes = peaks(one, ranks, (0, 1))
    assert len(errors) == 4  # both stages, two steps
    assert max(errors) <= 0.001
    assert planned_error(one, ranks, highest_bytes) <= 0.01


@pytest.mark.parametrize(
    "name", ["llama zero3 bf16 mb2 x2", *(pytest.param(name, marks=pytest.mark.slow) for name in PRETRAINED)]
)
def test_peaks_from_a_pretrained_folder(name, ranks, tmp_path):
    model = SHALLOW["llama"]
    source, inputs = find(model["model"]), TextInputs(vocab_size=2048, seq_len=model["seq_len"])
    weights: Any = build(source, inputs, model["model_args"])
    weights.bfloat16().save_pretrained(tmp_path)
    pretrained = {"llama": {"model": str(tmp_path), "seq_len": model["seq_len"], "tokenizer": "bytes"}}
    errors, _ = peaks(target(name, pretrained), ranks, (0, 1) if "pp2" in name else (0,))
    assert max(errors) <= 0.001


@pytest.mark.slow
def test_packed_conversations_take_a_mask(ranks, tmp_path):
    turns = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "A little more. " * 6}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    chats = {"llama": {**SHALLOW["llama"], "data": f"jsonl:{tmp_path}/chats.jsonl"}}
    one = target("llama zero2 bf16 mb2 x2", chats)
    assert are_packed(one.inputs)
    errors, highest_bytes = peaks(one, ranks, (0,))
    assert max(errors) <= 0.001
    assert planned_error(one, ranks, highest_bytes) <= 0.02
