"""Collectives and FLOPs of a simulated step against figures computed by hand."""

from __future__ import annotations

import pytest

from tests.simulate.targets import MATRICES, PARAMETERS, sent

TOKENS = 2 * 16


def test_stage_2_reduces_gradients_and_gathers_parameters(simulated):
    record = simulated["zero2 bf16 x8"]
    assert sent(record, "backward")["allreduce"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert sent(record, "step")["allgather_base"] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_stage_3_gathers_in_forward_and_scatters_gradients(simulated):
    record = simulated["zero3 bf16 x8"]
    assert sent(record, "forward")["allgather_base"] == pytest.approx(2 * MATRICES, rel=0.01)
    assert sent(record, "backward")["reduce_scatter_base"] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_tensor_parallelism_reduces_activations(simulated):
    """Row-parallel outputs in forward, the gradients of column-parallel inputs in backward, two of each a layer."""
    activation = 4 * TOKENS * 32
    rows = [r for r in simulated["tensor parallel"].sent if r.step == 1 and r.op == "allreduce"]
    forward = sum(r.bytes for r in rows if r.phase == "forward")
    assert forward == pytest.approx(2 * 2 * activation, rel=0.01)


def test_sequence_parallelism_turns_attention_around(simulated):
    """Queries, keys, values and outputs of half a sequence, once forward and once back, in both layers."""
    quarter = 4 * TOKENS // 2 * 32
    assert sent(simulated["sequence parallel"], "forward")["alltoall_base"] == pytest.approx(2 * 4 * quarter, rel=0.01)
    assert sent(simulated["sequence parallel"], "backward")["alltoall_base"] == pytest.approx(2 * 4 * quarter, rel=0.01)


def test_tensor_ranks_turn_their_own_heads_around(simulated):
    halved = sent(simulated["tensor and sequence"], "forward")["alltoall_base"]
    assert 2 * halved == sent(simulated["sequence parallel"], "forward")["alltoall_base"]


def test_a_pipeline_sends_activations_and_gradients(simulated):
    activation = 4 * TOKENS * 32
    assert sent(simulated["pipeline first"], "forward")["send"] == 4 * activation
    assert sent(simulated["pipeline last"], "backward")["send"] == 4 * activation


def test_dualpipev_sends_each_activation_twice(simulated):
    """The first stage sends out and gets back; four micro batches, one activation each way and its gradient."""
    activation = 4 * TOKENS * 32
    for end in ("first", "last"):
        rows = [row for row in simulated[f"dualpipev {end}"].sent if row.step == 1]
        assert sum(row.bytes for row in rows if row.op == "send") == 2 * 4 * activation


def test_flops_are_those_of_the_products(simulated):
    """2 x tokens x weights for each product (the embedding is none), attention 4 x tokens x length x width a layer."""
    weights = MATRICES - 64 * 32
    forward = 2 * TOKENS * weights + 2 * 4 * TOKENS * 16 * 32
    rows = {(r.phase, r.step): r.flops for r in simulated["zero2 fp32 x1"].flops}
    assert rows["forward", 1] == pytest.approx(forward, rel=0.001)
    assert rows["backward", 1] == pytest.approx(2 * forward, rel=0.05)
