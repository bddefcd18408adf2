"""Forecasts of spread experts against figures worked out by hand, for a model of two blocks with eight experts each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.plan.stub import BLOCK, BLOCKS, make_cluster, make_profile
from tests.plan.test_memory import cost
from zerofit.plan.degrees import Degrees, degree_problem
from zerofit.plan.fit import margin_bytes
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import forecast
from zerofit.plan.persistent import overlaps
from zerofit.plan.rates import rates_of
from zerofit.plan.time import Timer
from zerofit.plan.timeline import EXPERTS, timeline
from zerofit.spec.overhead import NCCL_ALL_TO_ALL_BYTES, NCCL_NVLINK_BYTES
from zerofit.spec.profile import ZERO3, LayerRun, Linear, Profile, setting

SPREAD = setting("bf16", False, 1, 1, 4)
DENSE, WHOLE, SHARE = 100_000, 800_000, 200_000  # elements of a block, of its experts, of a rank's two of them
PROFILE = Profile(
    model="hand",
    task="causal-lm",
    seq_len=8,
    layers=(
        LayerRun(name="embedding", count=1, matrices=(600_000,), vectors=()),
        LayerRun(name="block", count=2, matrices=(DENSE, WHOLE), vectors=()),
    ),
    costs={
        setting("bf16", False, 1, 1): (cost(1000, 2000, 2000), cost(3000, 5000, 6000)),
        SPREAD: (
            cost(1000, 2000, 2000, matrices=(600_000,)),
            cost(3000, 5000, 6000, matrices=(DENSE, SHARE), experts=(1,)),
        ),
    },
    model_type="mixtral",
    experts=8,
)


LARGE_EMBEDDING = (replace(PROFILE.layers[0], matrices=(2_000_000,)), PROFILE.layers[1])


def layout(stage: int, **more) -> PlannedLayout:
    sizes = {"micro_batch": 1, "bucket": 1_000_000, "precision": "bf16"}
    return PlannedLayout(zero_stage=stage, dp=8, ep=4, **{**sizes, **more})


@pytest.mark.parametrize("more", [{}, {"micro_batch": 2}])
def test_costs_of_stage_3_alone_are_those_of_the_same_experts(more):
    """As of DeepSeek-V3, whose buffers have 16 bits at stage 3."""
    own = replace(PROFILE, zero3={f"{key}{ZERO3}": layers for key, layers in PROFILE.costs.items()})
    assert forecast(own, layout(3, **more)) == forecast(PROFILE, layout(3, **more))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_static_bytes_where_two_ranks_hold_the_same_experts(stage):
    """A rank has 1.2 million elements, and states of 800,000 / 8 and of its experts' 400,000 / 2."""
    part = 800_000 // 8 + 400_000 // 2
    expected = {1: 2 * 1_200_000 + 12 * part, 2: 2 * 1_200_000 + 12 * part, 3: 16 * part + 2 * 1_000_000}
    assert forecast(PROFILE, layout(stage)).static_bytes == expected[stage]


def test_which_ranks_keep_gradients_of_which_parameters():
    """The embedding lies on six ranks, each block on one, and the experts of one block on every other half of ranks."""
    line = timeline(PROFILE, SPREAD)
    assert overlaps(line, 8, int) == [800_000] * 4 + [800_000] * 2 + [300_000] * 2
    assert [group[0].group for group in line.members if group] == [0, EXPERTS]


def test_experts_are_grouped_by_their_size():
    """DeepSpeed's groups of experts have 178,956,971 elements at most."""
    large = replace(PROFILE.costs[SPREAD][1], matrices=(DENSE, 100_000_000))
    line = timeline(replace(PROFILE, costs={SPREAD: (PROFILE.costs[SPREAD][0], large)}), SPREAD)
    assert line.groups == ((600_000, DENSE, DENSE), (), (100_000_000,), (100_000_000,))


def test_tokens_go_to_experts_and_back_in_both_directions():
    sent = 2 * 2**20  # bytes per sample, to the experts and back
    profile = make_profile(model_type="mixtral")
    (plain,) = profile.costs[setting("bf16", False, 1, 1)]
    one = replace(plain, matrices=(BLOCK // 4, BLOCK // 2), experts=(1,), ep_alltoall_bytes=Linear(per_sample=sent))
    key = setting("bf16", False, 1, 1, 4)
    cluster = make_cluster()
    rates = replace(rates_of(cluster, "bf16"), link=1e11, link_reduce=1e11, call_s=0.0, hop_s=0.0, streaming=math.inf)
    timer = Timer(replace(profile, costs={**profile.costs, key: (one,)}), cluster, rates)
    step = timer.step(layout(1, micro_batch=1, bucket=10**9))
    assert step.experts_s == pytest.approx(BLOCKS * 2 * sent * 3 / 4 / 1e11)
    # all ranks reduce a quarter of a block; the two ranks that hold the same experts half of one
    reduced = 2 * (7 / 8 * BLOCK / 4 + 1 / 2 * BLOCK / 2)
    assert step.reduce_s == pytest.approx(BLOCKS * 2 * reduced / 1e11)


def test_direct_connections_and_groups_are_kept_free():
    """Two groups of ranks, and connections to the three others that hold experts."""
    cluster = make_cluster()
    more = margin_bytes(0, layout(1), cluster) - margin_bytes(0, replace(layout(1), ep=1), cluster)
    assert more == 2 * NCCL_NVLINK_BYTES + NCCL_ALL_TO_ALL_BYTES * 3 // 7


@pytest.mark.parametrize(
    ("degrees", "changed", "word"),
    [
        (Degrees(ep=3), {}, "possible degrees: 1, 2, 4, 8"),
        (Degrees(pp=2, ep=4), {"layers": LARGE_EMBEDDING}, "stage 0 of --pipeline 2 has no layer with experts"),
        (Degrees(ep=16), {"experts": 16}, "16 does not divide the 8 data and sequence parallel ranks"),
        (Degrees(ep=2), {"model_type": "llama"}, "does not support DeepSpeed's AutoEP for"),
        (Degrees(pp=2, ep=8), {}, "8 does not divide the 4 data and sequence parallel ranks"),
        (Degrees(tp=2, ep=2), {"attention_heads": 8, "kv_heads": 8}, "with --tensor-parallel"),
    ],
)
def test_degrees_that_are_impossible(degrees, changed, word):
    problem = degree_problem(degrees, replace(PROFILE, **changed), make_cluster())
    assert problem and word in f"{problem.message} {problem.hint}"
