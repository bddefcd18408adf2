"""Forecasts against figures worked out by hand, for a model of one million parameters in two kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from zerofit.plan import memory as memory_module
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster, forecast
from zerofit.plan.persistent import (
    overlap_in_partition,
    overlaps_and_pieces,
    parameters_offloaded,
    partitions,
    sub_groups,
)
from zerofit.plan.pipeline import stage_bounds
from zerofit.plan.space import PlanRequest, space_of
from zerofit.plan.timeline import timeline
from zerofit.plan.zero3_gather import gathered_in_backward, gathered_in_forward, gathered_to_score
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import BackwardMoment, LayerCost, LayerRun, Linear, ModuleCall, Profile, setting

ZERO = Linear()
K = 1000  # the micro batch whose activations count in millions of bytes


def per_sample(bytes_: float) -> Linear:
    return Linear(per_sample=bytes_)


def cost(saved: int, forward: int, backward: int, **more) -> LayerCost:
    return LayerCost(
        saved_bytes=per_sample(saved),
        forward_peak_bytes=per_sample(forward),
        backward_peak_bytes=per_sample(backward),
        output_bytes=per_sample(1000),
        **more,
    )


SETTING = setting("bf16", False, 1, 1)
COSTS = (cost(1000, 2000, 2000), cost(3000, 5000, 6000))
PROFILE = Profile(
    model="hand",
    task="causal-lm",
    seq_len=8,
    layers=(
        LayerRun(name="embedding", count=1, matrices=(600_000,), vectors=()),
        LayerRun(name="block", count=2, matrices=(200_000,), vectors=()),
    ),
    costs={setting(p, c, 1, s): COSTS for p in ("fp32", "bf16", "fp16") for c in (False, True) for s in (1, 2)},
    model_type="llama",
)


def layout(stage: int, **more) -> PlannedLayout:
    return PlannedLayout(**{"zero_stage": stage, "micro_batch": 1, "bucket": 1_000_000, "precision": "bf16", **more})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_static_bytes_of_a_mixed_precision_adam(stage, device):
    """Stage 0: 2 + 4 + 8 bytes an element; 1, 2: 2 + 12/4; 3: (2 + 12 + 2)/4 and its bucket."""
    expected = {0: 14_000_000, 1: 5_000_000, 2: 5_000_000, 3: 4_000_000 + 2_000_000}
    assert forecast(PROFILE, layout(stage, dp=4), device).static_bytes == expected[stage]


TIED = replace(
    PROFILE,
    layers=(*PROFILE.layers, LayerRun(name="head", count=1, matrices=(), vectors=(), tied_to="embedding")),
    costs={SETTING: (*COSTS, cost(1000, 2000, 2000))},
)


def test_a_stage_takes_no_norm_of_the_tied_matrix_that_another_one_has():
    """The last of two stages has a block and a copy of the embedding's matrix (stage_1_and_2.py:2680)."""
    assert overlaps_and_pieces(timeline(TIED, SETTING, ((2, 4),)), 1) == ((800_000, 200_000),)


def test_without_weight_decay_all_parameters_are_one_group():
    """With norms in each block; a group is padded to a multiple of 2 x 4 ranks (stage_1_and_2.py:390)."""
    normed = replace(PROFILE, layers=(PROFILE.layers[0], replace(PROFILE.layers[1], vectors=(100, 3))))
    line = timeline(normed, SETTING, weight_decay=False)
    assert line.groups == ((600_000, 200_000, 100, 3, 200_000, 100, 3), ())
    assert (partitions(timeline(normed, SETTING), 4), partitions(line, 4)) == ((250_000, 52), (250_052,))


@pytest.mark.parametrize(("schedule", "apart"), [("1f1b", True), ("dualpipev", False)])
def test_stages_that_have_one_matrix_exchange_its_gradient(schedule, apart):
    """In DualPipeV the first stage has both ends."""
    planned = layout(1, pp=2, accumulation=4, schedule=schedule)
    assert forecast(TIED, planned).more_communicators == apart
    assert not forecast(PROFILE, layout(1, pp=2, accumulation=4)).more_communicators


@pytest.mark.parametrize(("stage", "dp", "whole"), [(3, 4, 1), (3, 1, 0), (2, 4, 0)])
def test_whole_weights_at_stage_3_are_sent_in_a_group_of_their_own(stage, dp, whole):
    """transformers' are divided before the engine has them; seen in `zerofit simulate resnet50 --ds-config zero3`."""
    plain = replace(PROFILE, model_type=None)
    assert forecast(plain, layout(stage, dp=dp)).more_communicators == whole
    assert not forecast(replace(PROFILE, model_type="llama"), layout(stage, dp=dp)).more_communicators


@pytest.mark.parametrize("parts", [((0, 2),), ((0, 1), (3, 4))], ids=["two stages", "two parts of one"])
def test_a_part_adds_no_gradients_of_a_tied_matrix(parts):
    """In the whole model the head's and the embedding's are added into a third one."""
    one = 1_200_000
    added = BackwardMoment(live=(Linear(fixed=3 * one), Linear(fixed=2 * one, per_sample=500)), parameter=0)
    traced = replace(TIED, costs={SETTING: (replace(COSTS[0], backward=(added,)), *TIED.costs[SETTING][1:])})
    assert [event.live for event in timeline(traced, SETTING, parts).backward if event.layer == 0] == [((one, 500),)]
    whole = timeline(traced, SETTING).backward
    assert [event.live[0] for event in whole if event.layer == 0] == [(3 * one, 0)]


FROZEN = replace(
    PROFILE,
    layers=(
        LayerRun(name="embedding", count=1, matrices=(), vectors=(), frozen=(600_000,)),
        LayerRun(name="block", count=2, matrices=(100_000,), vectors=(), frozen=(100_000,)),
    ),
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_have_no_states(stage):
    """2 bytes for each of a million, 12 for the 200,000 that are trained; stage 3 has a quarter, and a bucket."""
    expected = {0: 4_400_000, 1: 2_600_000, 2: 2_600_000, 3: 500_000 + 600_000 + 100_000 + 2_000_000}
    assert forecast(FROZEN, layout(stage, dp=4)).static_bytes == expected[stage]
    assert (FROZEN.parameters, FROZEN.trained) == (1_000_000, 200_000)


@pytest.mark.parametrize(("checkpointing", "elements"), [(False, 400_000), (True, 1_000_000)])
def test_stage_3_does_not_gather_for_a_backward_that_is_not(checkpointing, elements):
    """Both blocks stay gathered; the frozen embedding, released after its forward, where they are not checkpointed."""
    line = timeline(FROZEN, setting("bf16", checkpointing, 1, 1))
    planned = layout(3, dp=4, checkpointing=checkpointing)
    assert max(gathered_in_backward(line, planned)) == 2 * elements


def called(*members: int) -> tuple[ModuleCall, ...]:
    """Calls of a module without parameters, and of one for each of these within it."""
    inside = [ModuleCall(begins, (n,)) for n in members for begins in (True, False)]
    return (ModuleCall(True), *inside, ModuleCall(False))


@pytest.mark.parametrize(("live", "most"), [(10**9, [800, 500, 700, 400, 400]), (400_000, [600, 300, 500, 400, 400])])
def test_at_stage_3_fetching_runs_away_from_releasing(live, most):
    """A block of two parameters fetches three ahead, until the limit of live ones, which the last may pass.

    Embedding: its 600 thousand and the first 200 of a block. Blocks: 100 + 200 + 200 at the second of three modules;
    then 300 + 200 + 200, the last two of the trained blocks, which stay for their backward.
    """
    blocks = (LayerRun(name="block", count=2, matrices=(), vectors=(), frozen=(200_000, 100_000)), PROFILE.layers[1])
    costs = (COSTS[0], replace(COSTS[1], calls=called(0, 1)), COSTS[1])
    profile = replace(FROZEN, layers=(FROZEN.layers[0], *blocks), costs={setting("bf16", False, 1, 1): costs})
    line = timeline(profile, setting("bf16", False, 1, 1))
    four = layout(3, dp=4, prefetch=1, live=live)
    assert gathered_in_forward(line, four) == [2000 * one for one in most]
    assert max(gathered_in_backward(line, four)) == 2 * 400_000


def test_a_tied_matrix_is_gathered_for_the_head():
    """The embedding, which is released after its own forward where the head is too far, and the trained block."""
    blocks = replace(FROZEN.layers[1], matrices=(), frozen=(200_000,)), replace(PROFILE.layers[1], count=1)
    head = LayerRun(name="head", count=1, matrices=(), vectors=(), tied_to="embedding")
    shared = replace(COSTS[1], calls=(ModuleCall(True, others=((0, 0),)), ModuleCall(False, others=((0, 0),))))
    costs = {setting("bf16", False, 1, 1): (COSTS[0], COSTS[1], COSTS[1], shared)}
    line = timeline(replace(FROZEN, layers=(FROZEN.layers[0], *blocks, head), costs=costs), next(iter(costs)))
    assert line.still == 3
    assert gathered_in_backward(line, layout(3, dp=4))[0] == 2 * 800_000


def held(begins: bool) -> ModuleCall:
    """The model's own module, which reads the head's matrix."""
    return ModuleCall(begins, others=((2, 0),), fed=not begins)


@pytest.mark.parametrize("reuse", [0, 10**9])
def test_a_matrix_that_the_model_reads_is_gathered_with_it(reuse):
    """The head's 400,000 stay while the model runs: beside the embedding, then beside each block, then alone.

    With reuse, DeepSpeed keeps what the backward uses again, except after a forward without gradients.
    """
    layers = (*PROFILE.layers, LayerRun(name="head", count=1, matrices=(400_000,), vectors=()))
    first = replace(COSTS[0], calls=(held(True), *called(0)))
    costs = {SETTING: (first, replace(COSTS[1], calls=called(0)), replace(COSTS[1], calls=(held(False),)))}
    profile, four = replace(PROFILE, layers=layers, costs=costs), layout(3, dp=4, prefetch=0, reuse=reuse)
    released = [2 * n for n in (1_000_000, 600_000, 600_000, 400_000)]
    kept = [2 * n for n in (1_000_000, 1_200_000, 1_400_000, 1_400_000)]
    assert gathered_in_forward(timeline(profile, SETTING), four) == (kept if reuse else released)
    with patch.object(Profile, "scored", "first"):
        scored = timeline(replace(profile), SETTING)
    assert gathered_in_forward(scored, four) == released
    assert gathered_to_score(scored, four) == 2_000_000
    # the copy prefetches all of its 1,400,000; it runs after the trained model, which has released everything
    assert gathered_to_score(scored, four, scored) == 2 * 1_400_000
    for when in ("within", "reentrant"):  # without checkpointing, nothing is released in the backward
        with patch.object(Profile, "scored", when):
            line = timeline(replace(profile), SETTING)
        assert gathered_in_forward(line, four) == released
        assert gathered_in_backward(line, four)[-1] == 2 * 1_400_000


PACKED = replace(
    PROFILE,
    layers=(
        FROZEN.layers[0],
        LayerRun(
            name="block",
            count=2,
            matrices=(100_000,),
            vectors=(),
            quantized=(400_000,),
            packed=(200_000,),
            quantized_bytes=212_500,
            buffers_bytes=212_500,
        ),
    ),
)


def test_stage_3_divides_the_bytes_of_quantized_weights_but_not_their_scales():
    """A quarter of 2 bytes each for 600,000, of 16 for 200,000, of 400,000 packed; 25,000 of scales, and a bucket."""
    memory = forecast(PACKED, layout(3, dp=4))
    assert memory.static_bytes == 300_000 + 800_000 + 100_000 + 25_000 + 2_000_000
    gathered = gathered_in_backward(timeline(PACKED, setting("bf16", False, 1, 1)), layout(3, dp=4))
    assert max(gathered) == 2 * 200_000 + 400_000  # the embedding has no backward, and of the blocks all stays


def test_weights_in_4_bits_go_with_all_stages_and_on_no_disk():
    request = PlanRequest(precision="bf16", micro_batch=1, checkpointing=False)
    families = space_of(PACKED, Cluster("h100-80gb", gpus=2), request).families
    kept = {(one.zero_stage, one.offload_param) for one, *_ in families}
    assert kept == {(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")}


@pytest.mark.parametrize("recomputed", [False, True])
def test_quantized_weights_are_released_as_others_are(recomputed):
    """One after the other: 200,000 bytes of a packed weight, then 2 for each of a matrix' 100,000 numbers."""
    costs = COSTS[0], replace(COSTS[1], calls=called(1, 0), recomputed=recomputed)
    line = timeline(replace(PACKED, costs=dict.fromkeys(PACKED.costs, costs)), setting("bf16", False, 1, 1))
    four = layout(3, dp=4, checkpointing=recomputed, reuse=0)
    assert max(gathered_in_forward(line, four)[1:]) == 200_000
    assert gathered_in_backward(line, four)[0] == 200_000 + (2 * 100_000 if recomputed else 0)  # and the matrix


def test_what_ranks_keep_of_quantized_weights_lies_on_the_host_where_it_is_asked():
    """A quarter of the 400,000 packed bytes; on the device 25,000 of scales and a bucket."""
    memory = forecast(PACKED, layout(3, dp=4, offload_param="cpu", offload_optimizer="cpu"))
    without = replace(PACKED.layers[1], quantized=(), packed=(), quantized_bytes=0, buffers_bytes=0)
    plain = forecast(
        replace(PACKED, layers=(PACKED.layers[0], without)),
        layout(3, dp=4, offload_param="cpu", offload_optimizer="cpu"),
    )
    assert memory.static_bytes - plain.static_bytes == 25_000
    assert memory.host_bytes - plain.host_bytes == 2 * 2**16  # 50,000 bytes of each block, as torch pins them


def test_each_stage_trains_something():
    assert stage_bounds(PROFILE, 2) == ((0, 1), (1, 3))
    assert stage_bounds(FROZEN, 2) == ((0, 2), (2, 3))


def test_stage_0_fp32_reduces_in_a_flat_copy():
    """12 bytes standing, 4 of gradients, 4 of the all-reduce's flat buffer, on every rank."""
    memory = forecast(PROFILE, layout(0, precision="fp32", dp=2))
    assert (memory.peak_bytes, memory.peak_phase) == (20_000_000, "backward")
    assert memory.breakdown == {
        "parameters": 4_000_000,
        "optimizer state": 8_000_000,
        "gradients": 4_000_000,
        "temporaries": 4_000_000,
    }


def test_stage_0_bf16_steps_on_flat_float32_gradients():
    """FusedAdam: 14 + 2 standing and gradients, 4 lifted, 4 flat; torch's AdamW: 4 lifted, two of the largest."""
    assert forecast(PROFILE, layout(0)).peak_bytes == 24_000_000
    on_cpu = forecast(PROFILE, layout(0), "cpu")
    assert (on_cpu.peak_bytes, on_cpu.peak_phase) == (14_000_000 + 2_000_000 + 4_000_000 + 8 * 600_000, "step")


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_keep_gradients_of_all_that_reaches_into_the_partition(stage):
    """Rank 1 of 2 has elements of all three matrices; rank 0's five sixths of the largest are lifted to float64."""
    line = timeline(PROFILE, setting("bf16", False, 1, 1))
    assert overlap_in_partition(line, 2) == 1_000_000
    memory = forecast(PROFILE, layout(stage, dp=2))
    assert (memory.peak_bytes, memory.peak_phase) == (8_000_000 + 2 * 600_000 + 8 * 500_000, "step")
    assert overlaps_and_pieces(line, 2) == ((1_000_000, 200_000), (600_000, 500_000))


def test_checkpoints_on_the_host_are_page_locked_each_by_itself():
    """Blocks keep 3,000 bytes of each sample there, rounded up to 4,096."""
    costs = tuple(replace(one, host_bytes=one.output_bytes) for one in (COSTS[1], COSTS[1]))
    hosted = replace(PROFILE, costs=dict.fromkeys(PROFILE.costs, (COSTS[0], costs[0])))
    three = layout(1, dp=2, micro_batch=3)
    before, after = forecast(PROFILE, three), forecast(hosted, three)
    assert after.host_bytes - before.host_bytes == 2 * 4096
    piped = replace(three, dp=1, pp=2, accumulation=4)
    assert forecast(hosted, piped).host_bytes == 2 * 4096  # of the last stage, which has one micro batch at a time
    assert after.peak_bytes == before.peak_bytes  # what the device saves is in the trace


def test_stage_1_waits_with_whole_gradients_beside_its_bucket():
    """Static 8, gradients 2, bucket 2; then the bucket's flat copy; without tied or saved activations that is all."""
    memory = forecast(PROFILE, layout(1, dp=2, bucket=8_000_000))
    assert (memory.peak_bytes, memory.peak_phase) == (8_000_000 + 16_000_000 + 2_000_000, "backward")


def test_stage_1_with_overlap_has_gradients_and_buckets_when_the_last_backward_begins():
    """Static 8, activations 10, an earlier micro batch's gradients 2, and the two buckets that it made."""
    memory = forecast(PROFILE, layout(1, dp=2, micro_batch=K, accumulation=2, overlap=True, bucket=100_000))
    assert (memory.peak_bytes, memory.peak_phase) == (8_000_000 + 10_000_000 + 2_000_000 + 2 * 200_000, "backward")


def test_stage_2_peaks_before_its_bucket_where_activations_rule():
    """Last block's backward: saved 1 + 3 (a million each for K samples), and its own 6; no bucket before a gradient."""
    memory = forecast(PROFILE, layout(2, dp=2, micro_batch=K))
    assert (memory.peak_bytes, memory.peak_phase) == (8_000_000 + 10_000_000, "backward")
    assert memory.breakdown["activations"] == 10_000_000


def test_stage_3_gathers_and_gives_back():
    """All parameters stay from forward to backward (2 x what follows is below 1e9), and are whole at its start."""
    memory = forecast(PROFILE, layout(3, dp=2, micro_batch=K, bucket=100_000))
    static = 500_000 * (2 + 12 + 2) + 200_000
    assert memory.static_bytes == static
    assert memory.peak_bytes == static + 2_000_000 + 10_000_000
    assert memory.breakdown["gathered parameters"] == 2_000_000
    assert "gathered parameters" not in forecast(PROFILE, layout(3, dp=1, micro_batch=K)).breakdown


def test_stage_3_steps_sub_group_after_sub_group():
    memory = forecast(PROFILE, layout(3, dp=2, bucket=100_000))
    assert (memory.peak_bytes, memory.peak_phase) == (8_200_000 + (4 + 2) * 500_000, "step")


def test_accumulation_carries_gradients_into_the_next_forward_and_backward():
    once, often = (forecast(PROFILE, layout(0, micro_batch=K, accumulation=n)).peak_bytes for n in (1, 4))
    assert (once, often) == (24_000_000, 14_000_000 + 2_000_000 + 10_000_000)


def test_offloaded_states_are_on_the_host():
    """Device: parameters and one buffer of the largest; host: 12 and 4 of gradients for half, two buffers.

    Page-locked memory comes in powers of two: all of it but the moments.
    """
    memory = forecast(PROFILE, layout(2, dp=2, offload_optimizer="cpu"))
    assert memory.static_bytes == 2_000_000 + 1_200_000
    assert memory.host_bytes == 500_000 * 8 + 2 * 2**21 + 2**20 + 2**21
    both = forecast(PROFILE, layout(2, dp=2, offload_optimizer="cpu"), "cpu")
    assert both.static_bytes == memory.static_bytes + 500_000 * 16 + 2 * 500_000 + 1_200_000


def test_nvme_takes_states_and_masters():
    memory = forecast(PROFILE, layout(3, dp=2, offload_optimizer="nvme"))
    assert memory.nvme_bytes == 16 * 500_000
    # gradients in bf16, four swap buffers, and moments as they are made
    assert memory.host_bytes == 2**20 + 4 * 2**21 + 8 * 500_000


def test_gradients_for_disks_stay_in_float32_until_the_bucket_is_written():
    """Of both blocks beside the embedding's, which is lifted to float64 for its norm; for the host one is alone."""
    cpu, nvme = (forecast(PROFILE, layout(3, offload_optimizer=where)) for where in ("cpu", "nvme"))
    assert cpu.breakdown["temporaries"] == 2_000_000 + (2 + 8) * 600_000
    assert nvme.breakdown["temporaries"] == cpu.breakdown["temporaries"] + 4 * 400_000
    assert nvme.peak_phase == "backward"


def test_parameters_on_nvme_leave_files_and_buffers():
    """Of the first one's bf16 part of 600 kB nothing is on disk, being below a MiB; of three times as much it is."""
    both = layout(3, dp=2, offload_optimizer="nvme", offload_param="nvme")
    cpu, nvme = (forecast(PROFILE, replace(both, offload_param=where)) for where in ("cpu", "nvme"))
    assert nvme.nvme_bytes == cpu.nvme_bytes
    assert nvme.host_bytes - cpu.host_bytes == 2**23  # 5 buffers of 1.2 MB
    large = replace(PROFILE, layers=(replace(PROFILE.layers[0], matrices=(1_800_000,)), PROFILE.layers[1]))
    written = forecast(large, both).nvme_bytes - forecast(large, replace(both, offload_param="cpu")).nvme_bytes
    assert written == 1_800_192  # whole blocks of 1024 bytes


def test_parameters_beyond_a_milliard_are_read_in_turn():
    """On one rank: 2 bytes of 1e9 in memory; buffers for 5 of the largest, and for the largest sub-group in full."""
    deep = replace(PROFILE, layers=(replace(PROFILE.layers[1], count=4, matrices=(500_000_000,)),))
    line = timeline(replace(deep, costs={setting("bf16", False, 1, 1): COSTS[1:]}), setting("bf16", False, 1, 1))
    one = layout(3, offload_param="nvme")
    assert [group.part for group in sub_groups(line, lambda p: p.numel)] == [1_000_000_000] * 2
    found = parameters_offloaded(line, one, lambda p: p.numel, 2, "cuda")
    assert found.host == {"parameters": 2**31, "swap buffers": 2**33 + 2**31}


def test_offloaded_parameters_leave_the_device():
    here, away = (forecast(PROFILE, layout(3, dp=2, offload_param=where)) for where in ("none", "cpu"))
    assert here.static_bytes - away.static_bytes == 1_000_000
    assert away.host_bytes == 2**20


def test_overlap_takes_a_second_bucket():
    one, two = (forecast(PROFILE, layout(2, dp=2, overlap=on, bucket=8_000_000)).peak_bytes for on in (False, True))
    assert two - one == 16_000_000


def test_a_pipeline_is_balanced_and_keeps_micro_batches_in_flight():
    """fp32, stage 0: 12 x 0.6, gradients 2.4, one more micro batch saved (1), backward (2), a gradient buffer (1)."""
    assert stage_bounds(PROFILE, 2) == ((0, 1), (1, 3))
    first = 7_200_000 + 2_400_000 + 1_000_000 + 2_000_000 + 1_000_000
    # stage 1: 12 x 0.4, gradients 1.6, saved 3 and 6, the buffer that receives, twice logits, inputs, their gradients
    last = 4_800_000 + 1_600_000 + 9_000_000 + 1_000_000 + 2_000_000 + 4_000_000
    memory = forecast(PROFILE, layout(0, precision="fp32", pp=2, accumulation=4, micro_batch=K))
    assert memory.peak_bytes == max(first, last) == last


def test_stages_of_equally_many_layers_may_need_different_memory():
    runs = tuple(replace(PROFILE.layers[0], name=str(n), matrices=(n * 100_000,)) for n in (1, 2, 9, 3))
    profile = replace(PROFILE, layers=runs, costs={SETTING: (COSTS[0],) * 4})
    memory = forecast(profile, layout(0, pp=4, accumulation=4, micro_batch=1))
    assert memory.breakdown["parameters"] == 2 * 900_000


def test_stages_hold_less_without_more_micro_batches():
    few, many = (
        forecast(PROFILE, layout(0, precision="fp32", pp=3, accumulation=n, micro_batch=10 * K)) for n in (1, 8)
    )
    assert few.peak_bytes < many.peak_bytes


def test_traced_moments_tell_when_gradients_come():
    """The peak of 6 is before the gradient: at stage 0 that gradient is not there yet, and later ones see 2 less."""
    moments = (BackwardMoment(live=(per_sample(6000),), parameter=0), BackwardMoment(live=(per_sample(1000),)))
    traced = replace(PROFILE, costs={"bf16/checkpointing=0/tp=1/sp=1": (COSTS[0], replace(COSTS[1], backward=moments))})
    plain, known = (forecast(p, layout(2, dp=2, micro_batch=K)) for p in (PROFILE, traced))
    assert plain.peak_bytes == known.peak_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_breakdown_is_the_peak_and_more_ranks_need_no_more(stage, device):
    tell = Forecaster(PROFILE, device)
    for offload in ("none", "cpu") if stage else ("none",):
        static = []
        for dp in (1, 2, 4, 8, 64):
            for micro_batch in (1, 7, K):
                one = layout(stage, dp=dp, micro_batch=micro_batch, offload_optimizer=offload, accumulation=2)
                memory = tell.memory(one)
                assert sum(memory.breakdown.values()) == memory.peak_bytes >= memory.static_bytes
            static.append(memory.static_bytes + memory.host_bytes)
        if stage in (1, 2) and offload == "cpu":
            continue  # parameters that lie across a partition's bounds are kept whole
        assert static == sorted(static, reverse=True)


def test_a_setting_without_a_trace_is_an_error():
    with pytest.raises(KeyError, match="tp=2"):
        forecast(PROFILE, layout(1, tp=2))


def test_layouts_that_differ_in_the_micro_batch_alone_share_all_but_a_multiplication():
    tell = Forecaster(PROFILE)
    with patch.object(memory_module, "persistent_memory", wraps=memory_module.persistent_memory) as tables:
        for dp in (1, 2, 4, 8):
            for stage in (0, 1, 2, 3):
                for micro_batch in range(1, 65):
                    tell.memory(layout(stage, dp=dp, micro_batch=micro_batch))
    assert tables.call_count == 4 * 4  # benchmarks/plan_speed.py measures seconds


def test_the_largest_blocks_that_come_and_go():
    """Stage 0 in float32: the embedding's gradient, the copy of all gradients for one all-reduce, an activation."""
    more = tuple(replace(one, largest_bytes=per_sample(size)) for one, size in zip(COSTS, (500, 700), strict=True))
    profile = replace(PROFILE, costs={setting("fp32", False, 1, 1): more})
    found = forecast(profile, layout(0, precision="fp32", micro_batch=K, dp=2))
    assert found.large_bytes == 4 * 600_000 + 4 * 1_000_000 + 700 * K
    bucket = forecast(profile, layout(1, precision="fp32", micro_batch=K, dp=2, overlap=True)).large_bytes
    assert bucket >= 4 * 600_000 + 2 * 4 * 1_000_000 + 700 * K  # with overlap there are two


def test_the_flat_gradients_of_a_step_are_blocks_where_the_step_is_the_peak():
    """Stage 1 in bf16: 4.6 million gradients flat in bf16 and float32; with enough activations no room is lacking."""
    profile = replace(PROFILE, layers=(PROFILE.layers[0], replace(PROFILE.layers[1], count=20)))
    small, large = (forecast(profile, layout(1, micro_batch=size)) for size in (1, 2 * K))
    assert (small.peak_phase, small.large_bytes) == ("step", (2 + 4) * 4_600_000)
    assert large.peak_phase == "backward" and large.large_bytes < 4 * 4_600_000


def test_a_flat_copy_of_the_start_is_no_block_of_a_step():
    more = tuple(replace(one, largest_bytes=per_sample(700)) for one in COSTS)
    layers = (PROFILE.layers[0], replace(PROFILE.layers[1], count=20))  # 4.6 million parameters
    profile = replace(PROFILE, layers=layers, costs={setting("fp32", False, 1, 1): more})
    found = forecast(profile, layout(2, precision="fp32", dp=8, bucket=200_000))
    assert 4 * (600_000 + 200_000) + 700 < found.large_bytes < 4 * 4_600_000  # gradient and bucket; never all of them
