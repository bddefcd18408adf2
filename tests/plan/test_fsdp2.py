"""FSDP2's memory by hand: an embedding and a head of 600,000 elements, and two blocks of 200,000."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.test_memory import COSTS, PROFILE, SETTING, cost
from zerofit.plan.fsdp2 import block_moments, shard
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster, forecast
from zerofit.plan.rates import rates_of
from zerofit.plan.space import PlanRequest, space_of
from zerofit.plan.time import Timer
from zerofit.plan.timeline import Parameter, timeline
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import LayerRun

HEAD = LayerRun(name="head", count=1, matrices=(600_000,), vectors=())
UNTIED = replace(PROFILE, layers=(*PROFILE.layers, HEAD), costs={SETTING: (*COSTS, cost(1000, 2000, 2000))})
SIZE = 1_600_000


def layout(**more) -> PlannedLayout:
    return PlannedLayout(
        **{"engine": "fsdp2", "zero_stage": 3, "micro_batch": 1, "dp": 4, "precision": "bf16", "bucket": 0, **more}
    )


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 4), (2, 2)])
def test_a_rank_keeps_its_part_of_weights_and_moments_in_float32(replicas, ranks):
    """With replicas, only the ranks of one of them divide the parameters."""
    assert forecast(UNTIED, layout(replicas=replicas)).static_bytes == 12 * SIZE // ranks


def test_offloaded_parameters_and_moments_leave_the_device():
    memory = forecast(UNTIED, layout(offload_optimizer="cpu", offload_param="cpu"))
    assert memory.static_bytes == 0
    assert memory.host_bytes >= 16 * SIZE // 4


def peaks(planned: PlannedLayout) -> dict[str, int]:
    """Return the peak of each phase, without activations."""
    found: dict[str, int] = {}
    for moment in Forecaster(UNTIED).along(planned):
        size = sum(size for kind, size in moment.bytes.items() if kind != "activations")
        found[moment.phase] = max(found.get(moment.phase, 0), size)
    return found


def test_the_head_is_gathered_beside_the_last_block_and_the_embedding_is_scattered_last():
    """Forward: the head, gathered and in its flat buffer, and the last block's buffer. Backward ends with the
    embedding's gradient, its input for the reduce-scatter, and the output in bf16 and float32; the parts of all other
    gradients are there."""
    found, kept = peaks(layout()), 12 * SIZE // 4
    assert found["forward"] == kept + 2 * (600_000 * 2 + 200_000)
    scattered = 2 * 600_000 + 2 * 600_000 + (2 + 4) * 150_000
    assert found["backward"] == kept + 4 * 1_000_000 // 4 + scattered
    assert found["step"] == kept + 4 * SIZE // 4


def test_without_reshard_all_layers_stay_gathered():
    assert peaks(layout(reshard=False))["forward"] == 12 * SIZE // 4 + 2 * SIZE + 2 * (600_000 + 200_000)


def test_torchtitan_adds_up_the_heads_gradient_in_float32():
    """The last chunk: the head, gathered; its gradient of all chunks, the scatter's input, and a part of its output."""
    found, kept = peaks(layout(engine="torchtitan")), 12 * SIZE // 4
    assert found["backward"] == kept + 2 * 600_000 + 4 * 600_000 + 4 * 600_000 + 4 * 150_000
    assert found["step"] == kept + 4 * SIZE // 4


def test_torchtitan_accumulates_parts_of_gradients():
    """Gradients of earlier micro batches wait in float32, as a rank's part."""
    once, more = (peaks(layout(engine="torchtitan", accumulation=n))["forward"] for n in (1, 2))
    assert more - once == 4 * SIZE // 4


def test_accelerate_accumulates_full_gradients():
    """Gradients of earlier micro batches wait in bf16, so the loss is reached with all of them."""
    assert peaks(layout(accumulation=2))["forward"] == 12 * SIZE // 4 + 2 * (600_000 * 2 + 200_000) + 2 * SIZE


def test_frozen_weights_are_kept_and_gathered_in_16_bits_without_states():
    """12 bytes for 200,000 of the blocks, 2 for 1.4 million; the head has no gradient to scatter."""
    ends = [LayerRun(name=name, count=1, matrices=(), vectors=(), frozen=(600_000,)) for name in ("embedding", "head")]
    block = LayerRun(name="block", count=2, matrices=(100_000,), vectors=(), frozen=(100_000,))
    partly = replace(UNTIED, layers=(ends[0], block, ends[1]))
    memory = forecast(partly, layout())
    assert memory.static_bytes == (12 * 200_000 + 2 * 1_400_000) // 4
    assert "communication buckets" not in memory.breakdown


@pytest.mark.parametrize(("ranks", "root", "block"), [(4, 300_000, 50_000), (7, 171_429, 28_572)])
def test_fsdp_1_flattens_a_block_and_embedding_with_head(ranks, root, block):
    """Forward has the root and a rank's bf16 part of it or of a block. Backward ends with the root's bf16 gradient, its
    float32 copy (with 7 ranks also a padded one), and a rank's part; the parts of the blocks are there."""
    found = peaks(layout(engine="verl-fsdp", dp=ranks))
    kept, padding = 12 * (root + 2 * block), 0 if ranks == 4 else 4 * ranks * root
    assert found["forward"] == kept + 2 * max((ranks + 1) * root, ranks * (root + block) + block)
    assert found["backward"] == kept + (2 + 4) * 1_200_000 + padding + 4 * root + 4 * 2 * block
    assert found["step"] == kept + 4 * (root + 2 * block)


def test_fsdp_1_gathers_the_block_before_in_backward():
    """The root, both blocks, and a rank's bf16 part of the first block."""
    forward, backward = block_moments(timeline(UNTIED, SETTING), layout(engine="verl-fsdp"))
    assert max(live.gathered for live in backward) == 2 * (1_200_000 + 2 * 200_000 + 50_000)
    assert max(live.gathered for live in forward if live.layer == 2) == 2 * (1_200_000 + 200_000 + 50_000)


def test_fsdp_1_accumulates_full_gradients_in_bf16():
    """Gradients of earlier micro batches, those of the last one, their float32 copy, and a rank's part."""
    found, kept = peaks(layout(engine="verl-fsdp", accumulation=2)), 12 * SIZE // 4
    assert found["forward"] == kept + 2 * (1_200_000 + 300_000) + 2 * SIZE
    assert found["backward"] == kept + (2 + 2 + 4) * 1_200_000 + 4 * SIZE // 4


def test_one_rank_of_fsdp_1_keeps_float32_gradients_and_releases_the_root():
    found, kept = peaks(layout(engine="verl-fsdp", dp=1)), 12 * SIZE
    assert found["backward"] == kept + (2 + 4) * 1_200_000 + 4 * 400_000
    assert found["step"] == kept + 4 * SIZE


@pytest.mark.parametrize(
    ("numel", "group", "ranks", "expected"), [(10 * 7, 0, 4, 3 * 7), (64, 1, 48, 2), (70, 0, 1, 70)]
)
def test_a_shard_has_full_rows_and_padding(numel, group, ranks, expected):
    """Of 10 rows the first rank of four has three; a vector is divided by elements."""
    assert shard(Parameter(numel, group, 0), ranks, 7) == expected


def test_a_search_has_both_engines_and_counts_what_is_not_forecast():
    cluster = Cluster("h100-80gb", gpus=8, nodes=2)
    both = PlanRequest(precision="bf16", micro_batch=1, engines=("deepspeed", "fsdp2"))
    found = {(c.engine, c.reshard, c.replicas) for family in space_of(UNTIED, cluster, both).families for c in family}
    mine = {("fsdp2", reshard, replicas) for reshard in (True, False) for replicas in (1, 2)}
    assert found == mine | {("deepspeed", True, 1)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 2}, "tensor, pipeline, sequence or expert"),
        ({"fixed": {"optimizer": "lion"}}, "with lion"),
        ({"fixed": {"ema": 0.99}}, "averaged"),
        ({"precision": "fp16"}, "fp16"),
        ({"by_rank": (2, 1)}, "each rank"),
    ],
)
def test_what_is_not_forecast_is_counted_with_its_reason(given, words):
    request = PlanRequest(**{"precision": "bf16", "micro_batch": 2, "engines": ("fsdp2",), **given})
    space = space_of(UNTIED, Cluster("h100-80gb", gpus=8), request)
    assert not space.families
    assert words in space.left_out["engine"][0].message


def test_a_second_gather_and_a_reduction_between_nodes_take_time():
    cluster = Cluster("h100-80gb", gpus=8, nodes=2)
    timer = Timer(UNTIED, cluster, rates_of(cluster, "bf16", None))
    each, once = (timer.parts(layout(dp=16, reshard=reshard)).fetches for reshard in (True, False))
    assert each and once
    assert [size for size, _ in each.forward] == [1_200_000, 400_000, 1_200_000]
    assert [size for size, _ in each.backward] == [1_200_000, 400_000, 0]
    assert [size for size, _ in once.backward] == [0, 0, 0]
