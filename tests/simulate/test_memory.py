"""Simulated memory against figures computed by hand, and against other simulations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.meter.planned import planned
from tests.simulate.conftest import TARGETS
from tests.simulate.targets import MATRICES, PARAMETERS, TINY, VECTORS, end_bytes, target
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.spec.errors import Problem
from zerofit.spec.memory_kinds import KINDS

TIED = {**TINY, "tie_word_embeddings": True}
BOTH = "tensor and sequence"
SCALARS = 2000  # bytes: step counters, losses, norms
WORKING = [name for name in TARGETS if name not in ("untraceable", "asking")]


def padded(elements: int, ranks: int) -> int:
    """A group of parameters as stages 1 and 2 flatten it: a multiple of 2 x ranks (stage_1_and_2.py:421, :1392)."""
    unit = 2 * ranks
    return -(-elements // unit) * unit


def static(stage: int, width: int, ranks: int) -> float:
    """Bytes between steps with torch's AdamW in float32, `width` bytes per parameter.

    Stage 0: parameters and two states, in bf16 master weights too. Stages 1 and 2: master weights and states of a
    partition. Stage 3: of parameters and gradients too, and the gradient bucket (even, as large as the model).
    """
    if stage == 0:
        return (width + 8 + (4 if width == 2 else 0)) * PARAMETERS
    group = padded(MATRICES, ranks) + padded(VECTORS, ranks)
    if stage < 3:
        return width * group + 12 * group / ranks
    kept = VECTORS  # below the persistence threshold: whole on every rank
    bucket = PARAMETERS + PARAMETERS % 2
    return width * kept + (2 * width + 12) * PARAMETERS / ranks + width * bucket


@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 8)])
@pytest.mark.parametrize("stage", range(4))
def test_static_memory_is_what_the_stage_keeps(simulated, stage, precision, ranks):
    wanted = static(stage, 4 if precision == "fp32" else 2, ranks)
    got = end_bytes(simulated[f"zero{stage} {precision} x{ranks}"])
    assert got == pytest.approx(wanted, abs=SCALARS + 0.01 * wanted)


@pytest.mark.parametrize("name", WORKING)
def test_the_breakdown_is_the_peak(simulated, name):
    record = simulated[name]
    assert not isinstance(record, Problem), record
    top = record.peaks[0]
    assert sum(top.breakdown.values()) == top.bytes == max(p.peak_bytes for p in record.phases)
    assert set(top.breakdown) <= set(KINDS)
    assert all(size >= 0 for size in top.breakdown.values())
    assert top.at.rsplit(":", 1)[1].isdigit()


@pytest.mark.parametrize(("name", "blocks", "ends"), [("pipeline and tensor", 1, 0), (BOTH, 2, 1)])
def test_a_rank_makes_its_slices_alone(simulated, name, blocks, ends):
    """Half of each block's matrices, its norms and the embedding; with the last block also a norm and half the head."""
    build = simulated[name].phases[0]
    matrix = 32 * 80
    elements = 64 * 32 + blocks * ((4 * 32 * 32 + 3 * matrix) // 2 + 2 * 32) + ends * (32 + 64 * 32 // 2)
    assert build.end_bytes == pytest.approx(4 * elements, abs=SCALARS)
    assert build.peak_bytes <= build.end_bytes + 4 * matrix


@pytest.mark.parametrize(
    ("names", "tp", "sp"),
    [(["pipeline and tensor", "pipeline and tensor last"], 2, 1), (["tensor and sequence"], 2, 2)],
)
def test_plan_forecasts_several_dimensions(simulated, names, tp, sp):
    """Within 1 % of the peak, and what is rounded by the tensor: these have a few KiB."""
    job, source = target(**TARGETS[names[0]]).job, find("llama-tiny")
    settings = [TraceSetting("fp32"), TraceSetting("fp32", tp=2, sp=sp)]
    profile = profile_model(source, "causal-lm", TextInputs(vocab_size=64, seq_len=16), TINY, settings, "cpu")
    forecast = Forecaster(profile, "cpu").memory(PlannedLayout.of(job)).peak_bytes
    assert forecast == pytest.approx(max(simulated[n].peaks[0].bytes for n in names), rel=0.01, abs=2 * SCALARS)


def test_plan_divides_parameters_in_the_models_order():
    """CLIP's images come first in forward, its text in `parameters()`: rank 0 has the whole embedding of tokens."""
    few = {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 3}}
    flags = {"model": "clip-vit-base-patch32", "model_args": few, "precision": "bf16", "kind": "h100-80gb"}
    one = target("zero2_offload", micro_batch=1, **flags)
    (record,) = simulate_all([one], lambda text: None)
    copy = 8 * 49408 * 512  # of its gradient in float64, for the norm
    assert record.peaks[0].breakdown["temporaries"] >= copy
    forecast = planned(one)
    assert forecast.breakdown["temporaries"] == copy
    assert forecast.peak_bytes == pytest.approx(record.peaks[0].bytes, rel=1e-4)


def test_plan_keeps_no_gradients_while_one_bucket_has_room_for_all():
    """Many equal layers, of which a plan looks at few, reduced together at the end."""
    flags: dict[str, Any] = {"model": "gpt2", "seq_len": 64, "precision": "bf16", "micro_batch": 4}
    flags["model_args"] = {"n_layer": 6}
    one = target({"zero_optimization": {"stage": 2}}, kind="h100-80gb", gpus=1, **flags)
    (record,) = simulate_all([one], lambda text: None)
    assert planned(one).peak_bytes == pytest.approx(record.peaks[0].bytes, rel=1e-3)


HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
WIDE: dict[str, Any] = {"model": "llama-tiny", "model_args": {**TINY, "vocab_size": 512}}
WIDE |= {"precision": "bf16", "micro_batch": 1, "seq_len": 4, "gradient_accumulation_steps": 1}
DIVIDED: dict[str, dict[str, Any]] = {  # flags, and keys of zero_optimization
    "stage 1, overlap, fp32": {"stage": 1, "overlap_comm": True, "precision": "fp32"},
    "stage 2, overlap, tied": {"stage": 2, "overlap_comm": True, "model_args": {**TIED, "vocab_size": 1024}},
    "stage 2, accumulated": {"stage": 2, "gradient_accumulation_steps": 2},
    "stage 2, offload": {"stage": 2, **HOST, "gradient_accumulation_steps": 2},
    "stage 2, activations at most": {"stage": 2, "seq_len": 64},
}


def divided(rank: int, changes: dict[str, Any]) -> SimulationTarget:
    flags = {name: changes.get(name, value) for name, value in WIDE.items()}
    zero = {"reduce_bucket_size": 10_000} | {name: value for name, value in changes.items() if name not in WIDE}
    return target({"zero_optimization": zero}, gpus=3, rank=rank, kind="h100-80gb", **flags)


def test_any_rank_names_the_one_that_needs_most():
    """All ranks are simulated, and each forecasts the others; where all need as much none is named."""
    found = simulate_all([divided(rank, c) for c in DIVIDED.values() for rank in range(3)], lambda text: None)
    differing = 0
    for n, name in enumerate(DIVIDED):
        records = [record for record in found[3 * n : 3 * n + 3] if isinstance(record, RankRecord)]
        needs = [record.needs for record in records]
        named = [rank if record.heavier_rank is None else record.heavier_rank for rank, record in enumerate(records)]
        assert [needs[rank] for rank in named] == [max(needs)] * 3, name
        differing += min(needs) < max(needs)
    assert differing == len(DIVIDED) - 1


def test_phases_follow_each_other(simulated):
    for name in WORKING:
        phases = simulated[name].phases
        assert [p.name for p in phases[:3]] == ["build", "init", "forward"]
        for before, after in itertools.pairwise(phases):
            assert before.end_bytes == after.start_bytes, name


def test_ranks_differ_only_where_they_should(simulated):
    for stage in (2, 3):
        first, last = simulated[f"zero{stage} first"], simulated[f"zero{stage} last"]
        for one, other in zip(first.phases, last.phases, strict=True):
            # the last partition is padded, at most by 2 x ranks elements of parameters, gradients, master and states
            assert one.peak_bytes == pytest.approx(other.peak_bytes, abs=5 * 4 * 2 * 8 + 64)
    first, last = (simulated[f"pipeline {end}"].peaks[0].breakdown for end in ("first", "last"))
    assert first.get("logits and loss", 0) <= 4 < last["logits and loss"]


def test_the_first_stage_keeps_two_micro_batches_and_the_last_one(simulated):
    """1F1B on two stages: two forwards before the first backward on the first stage, one on the last."""

    def order(name: str) -> list[str]:
        return [p.name for p in simulated[name].phases if p.step == 1]

    assert order("pipeline first")[0] == order("pipeline last")[0] == "forward"
    first = simulated["pipeline first"].phases
    forwards = [p for p in first if (p.name, p.step) == ("forward", 1)]
    activations = forwards[0].end_bytes - forwards[0].start_bytes
    # tokens of 2 x 16 int64 in, 32 floats a token out, and more in between: two micro batches are alive at its end
    assert activations >= 2 * (2 * 16 * 8 + 2 * 16 * 32 * 4)


def test_logits_and_loss(simulated):
    """In bf16: logits, their float32 copy, log-probabilities and the gradients of two of them."""
    logits = 2 * 16 * 64
    kinds = [m.breakdown.get("logits and loss", 0) for m in simulated["gpu"].peaks if m.step == 1]
    assert max(kinds) == pytest.approx(logits * (2 + 4 + 4 + 4), rel=0.35)
    assert max(kinds) >= logits * (2 + 4 + 4)


def test_host_and_device_are_told_apart(simulated):
    plain, offload, everything = (simulated[name] for name in ("gpu", "gpu offload", "gpu offload all"))
    assert end_bytes(plain) > end_bytes(offload) > end_bytes(everything) - 2 * PARAMETERS
    # master weights and two states of the partition, float32
    assert sum(offload.host.values()) >= 12 * PARAMETERS / 2
    assert offload.host["pinned"] > 0
    assert "optimizer state" not in offload.peaks[0].breakdown
    cpu = simulated["zero2 fp32 x1"]
    assert cpu.host == {"pageable": 0, "pinned": 0, "pinned_free": 0}


def test_nvme_holds_the_optimizer(simulated):
    """Master weights and two states, float32, of the partition; DeepSpeed leaves tensors below 1 MiB where they are."""
    parameters = 1_221_280
    assert simulated["gpu nvme"].nvme_bytes == pytest.approx(12 * parameters / 2, rel=0.02)


def test_direct_storage_reads_parameters_into_the_gpu():
    """With aio.use_gds, the buffers for parameters are on the GPU (swap_tensor/partitioned_param_swapper.py)."""
    on_nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1_000_448, "buffer_count": 5}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": on_nvme}}
    settings = {"model": "llama-tiny", "kind": "l4", "precision": "bf16"}
    usual, direct = simulate_all(
        [target({**config, "aio": {"use_gds": on}}, **settings) for on in (False, True)], lambda text: None
    )
    moved = 2 * on_nvme["buffer_size"] * on_nvme["buffer_count"]
    assert end_bytes(direct) - end_bytes(usual) == moved
    locked = [record.host_moments["build"].locked_bytes for record in (usual, direct)]
    assert locked[0] - locked[1] == moved


def test_checkpointing_trades_activations(simulated):
    kept = simulated["zero2 fp32 x1"]
    less = simulated["checkpointing"]
    assert activations_of(less) < activations_of(kept)
    forward = {name: sum(r.flops for r in a.flops) for name, a in (("kept", kept), ("less", less))}
    assert forward["less"] > forward["kept"]


def activations_of(record) -> int:
    phase = next(p for p in record.phases if (p.name, p.step) == ("forward", 1))
    return phase.end_bytes - phase.start_bytes


@pytest.mark.parametrize(("name", "said"), [("untraceable", "nonzero"), ("asking", "value of a tensor")])
def test_a_model_that_looks_at_values_names_the_op_and_the_line(simulated, name, said):
    problem = simulated[name]
    assert isinstance(problem, Problem)
    assert problem.kind == "not-simulated"
    assert said in problem.message
    assert "tests/simulate/own.py:" in problem.where
