"""Ranking, rejections and the questions the other way round, on a hand-made profile and formula."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.plan.stub import GIB, Formula, make_cluster, make_profile
from zerofit.plan.degrees import Degrees, degree_problem, settings_of
from zerofit.plan.fit import check_fit, margin_bytes
from zerofit.plan.inverse import fewest, largest, with_layers
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.outlook import Work
from zerofit.plan.pipeline import stage_bounds
from zerofit.plan.result import with_outlooks
from zerofit.plan.search import host_needed, pressure, search
from zerofit.plan.software import Software
from zerofit.plan.space import PlanRequest, space_of
from zerofit.spec.errors import UserError
from zerofit.spec.overhead import LAST_SEGMENTS_BYTES, NCCL_ALL_TO_ALL_BYTES, NCCL_NVLINK_BYTES
from zerofit.spec.profile import Kernel, Linear

REQUEST = PlanRequest(precision="bf16", global_batch=64)


def found(profile=None, cluster=None, request=REQUEST, **options):
    profile = profile or make_profile()
    return search(profile, cluster or make_cluster(), request, Formula(profile), **options)


def layouts(profile, cluster, request=REQUEST):
    return [layout for family in space_of(profile, cluster, request).families for layout in family]


def test_the_best_come_first_and_fit():
    answer = found(top=20)
    speeds = [one.samples_per_s for one in answer.layouts]
    assert len(speeds) == 20 and speeds == sorted(speeds, reverse=True)
    for one in answer.layouts:
        assert one.fit.exceeded is None and one.fit.device_bytes == one.memory.peak_bytes + one.fit.margin_bytes
        assert 0 < one.mfu < 1 and sum(one.memory.breakdown.values()) == one.memory.peak_bytes
        assert one.samples_per_s == pytest.approx(64 / one.time.step_s, rel=0.005)
    assert answer.considered == answer.fitting + sum(r.count for r in answer.rejections if r.layout)


def test_sizes_that_slow_products_are_named_with_what_padding_saves():
    profile = make_profile()
    assert found(profile).padding == ""
    odd = Kernel(
        kind="product",
        dtype="bfloat16",
        count=1.0,
        flops=Linear(per_sample=2.0 * 1024 * 768 * 50257),
        moved_bytes=Linear(per_sample=2.0 * 1024 * 50257),
        shape=(Linear(per_sample=1024), Linear(fixed=50257), Linear(fixed=768)),
    )
    costs = {
        key: tuple(replace(one, forward_kernels=(*one.forward_kernels, odd)) for one in mine)
        for key, mine in profile.costs.items()
    }
    slow, plain = found(replace(profile, costs=costs)), found(profile)
    assert slow.padding.startswith("padding 50,257 to 50,304 saves ") and "50304" in slow.padding
    assert slow.to_dict()["padding"] == slow.padding
    saved = float(slow.padding.partition(" saves ")[2].partition("%")[0]) / 100
    best, same = slow.layouts[0], [one for one in plain.layouts if one.layout == slow.layouts[0].layout]
    assert 0.01 < saved < 1 and (not same or best.step_s * (1 - saved) >= same[0].step_s * 0.99)


def test_only_what_deepspeed_and_zerofit_take():
    for layout in layouts(make_profile(), make_cluster(nodes=4)):
        assert sum(d > 1 for d in (layout.tp, layout.pp, layout.sp)) <= 1
        assert layout.world_size == 32
        assert layout.micro_batch * layout.accumulation * layout.dp == 64
        assert layout.zero_stage <= 1 or layout.pp == 1
        assert layout.accumulation >= layout.pp
        assert layout.offload_param == "none" or (layout.zero_stage == 3 and layout.offload_optimizer != "none")
        assert layout.offload_optimizer == "none" or layout.zero_stage >= 2
        assert 8 % layout.tp == 0 and 8 % layout.sp == 0  # heads, key-value heads and ranks of a node


def test_disks_only_where_there_are_some():
    cluster = make_cluster()
    assert not any(c.offload_optimizer == "nvme" for c in layouts(make_profile(), cluster))
    disks = replace(cluster, nvme=10**12)
    nvme = [c for c in layouts(make_profile(), disks) if "nvme" in (c.offload_optimizer, c.offload_param)]
    assert nvme and all(c.zero_stage == 3 for c in nvme)


def test_why_others_are_rejected():
    answer = found(cluster=make_cluster(memory_bytes=3 * GIB))
    (rejected,) = [r for r in answer.rejections if r.layout]
    assert rejected.reason == "device-memory-backward" and rejected.count > 100
    assert "GiB" in rejected.message and "margin" in rejected.message
    assert rejected.fit.exceeded == "device" and rejected.fit.utilization > 1
    assert rejected.hint.endswith("would fit")
    assert rejected.fit.utilization == pytest.approx(min(_overs(answer.cluster)))


def _overs(cluster):
    formula = Formula(make_profile())
    fits = [check_fit(formula(c), c, cluster) for c in layouts(make_profile(), cluster)]
    return [one.utilization for one in fits if one.exceeded]


def test_host_memory_is_counted_by_the_node():
    profile = make_profile(blocks=400)
    small = replace(make_cluster("rtx3090", gpus=2), host_memory=20 * GIB)
    answer = search(profile, small, PlanRequest(precision="bf16", global_batch=8), Formula(profile))
    assert "host-memory" in {r.reason for r in answer.rejections}
    assert not answer.layouts and answer.nearest is not None
    needed = host_needed(profile, small, PlanRequest(precision="bf16", global_batch=8), Formula(profile))
    for share, fits in ((1.001, True), (0.999, False)):
        cluster = replace(small, host_memory=int(needed * share))
        assert (
            pressure(profile, cluster, PlanRequest(precision="bf16", global_batch=8), Formula(profile)) <= 1
        ) is fits


def test_the_verdict_keeps_a_margin():
    profile, cluster = make_profile(), make_cluster()
    one, three = (next(c for c in layouts(profile, cluster) if c.zero_stage == stage) for stage in (1, 3))
    assert margin_bytes(10 * GIB, three, cluster) > margin_bytes(10 * GIB, one, cluster) > 1 * GIB


def test_the_largest_blocks_are_kept_free_where_the_usual_share_is_less():
    one, cluster = PlannedLayout(zero_stage=1, micro_batch=1), make_cluster()
    share, more, blocks = (margin_bytes(10 * GIB, one, cluster, large) for large in (0, GIB, 2 * GIB))
    rest = LAST_SEGMENTS_BYTES  # of segments for small blocks
    assert share == more and blocks - share == pytest.approx(1.03 * ((2 - 1.2) * GIB + rest))


@pytest.mark.parametrize(("dp", "tp", "groups"), [(1, 1, 3), (2, 1, 3), (2, 2, 2)])
def test_a_pipelines_communicators_are_kept_free(dp, tp, groups):
    """Stages, stages with tensor ranks, all ranks (which two other dimensions have already); two neighbors."""
    without = PlannedLayout(zero_stage=1, micro_batch=1, dp=dp, tp=tp)
    more = margin_bytes(0, replace(without, pp=2), make_cluster()) - margin_bytes(0, without, make_cluster())
    assert more == groups * NCCL_NVLINK_BYTES + NCCL_ALL_TO_ALL_BYTES * 2 // 7
    tied = margin_bytes(0, replace(without, pp=2), make_cluster(), more_communicators=1)
    assert tied - margin_bytes(0, replace(without, pp=2), make_cluster()) == NCCL_NVLINK_BYTES


def test_skipping_forecasts_changes_nothing():
    """Larger buckets are not forecast one by one; the counts are as if they were."""
    profile = make_profile(blocks=60)
    cluster = make_cluster(memory_bytes=16 * GIB)
    answer, formula = found(profile, cluster), Formula(profile)
    everything = layouts(profile, cluster)
    assert answer.considered == len(everything)
    assert answer.fitting == sum(check_fit(formula(c), c, cluster).exceeded is None for c in everything)


def test_degrees_that_do_not_divide_say_which_do():
    profile = make_profile(heads=12, kv_heads=12)
    with pytest.raises(UserError) as error:
        found(profile, request=PlanRequest(precision="bf16", tp=8))
    (problem,) = error.value.problems
    assert "does not divide the 12 attention heads" in problem.message
    assert problem.hint == "possible degrees: 1, 2, 3, 4, 6, 12"
    assert (
        degree_problem(Degrees(pp=3), profile, make_cluster()).hint
        == "use a multiple of 3 ranks, or a degree that divides 8"
    )
    assert "AutoTP" in degree_problem(Degrees(tp=2), make_profile(model_type="gpt2"), make_cluster()).message
    assert "at least as many layers" in degree_problem(Degrees(pp=16), profile, make_cluster(nodes=2)).message


def test_degrees_of_several_dimensions_are_looked_at_together():
    profile = make_profile(heads=12, kv_heads=12)
    assert degree_problem(Degrees(tp=2, sp=2, pp=2), profile, make_cluster()) is None
    problem = degree_problem(Degrees(tp=4, sp=2), profile, make_cluster())
    assert "--sequence-parallel 2 with --tensor-parallel 4 does not divide the 12 attention" in problem.message
    assert problem.hint == "possible degrees: 1"
    assert degree_problem(Degrees(tp=3, pp=2), profile, make_cluster()).hint == "use a multiple of 6 ranks"
    assert "at least as many layers" in degree_problem(Degrees(tp=2, pp=16), profile, make_cluster(nodes=4)).message
    assert "AutoTP" in degree_problem(Degrees(tp=2, pp=2), make_profile(model_type="bert"), make_cluster()).message
    asked = PlanRequest(precision="bf16", global_batch=64, tp=2, pp=2)
    answer = found(request=asked, top=3)
    assert {(one.layout.dp, one.layout.tp, one.layout.pp) for one in answer.layouts} == {(2, 2, 2)}


def test_eager_attention_has_no_sequence_parallel_layouts():
    """DeepSpeed's Ulysses refuses it (ulysses_sp.py:468)."""
    eager = PlanRequest(precision="bf16", global_batch=64, software=Software(attn_implementation="eager"))
    degrees = ({layout.sp for layout in layouts(make_profile(), make_cluster(), asked)} for asked in (REQUEST, eager))
    assert [max(found) > 1 for found in degrees] == [True, False]
    with pytest.raises(UserError, match="--sequence-parallel 2 with eager attention"):
        found(request=replace(eager, sp=2))


def test_a_pipeline_keeps_to_stage_1_whatever_the_states_are():
    keep = {"zero_stage": 2, "offload_optimizer": "cpu"}
    every = layouts(make_profile(), make_cluster(), PlanRequest(precision="bf16", micro_batch=1, fixed=keep))
    assert every and {(one.pp, one.zero_stage) for one in every} == {(1, 2)}


def test_a_fixed_degree_of_1_leaves_out_layouts_with_more():
    fixed = {"tp": 1, "pp": 1}
    every = layouts(make_profile(), make_cluster(), replace(REQUEST, fixed=fixed))
    assert {(one.world_size, one.tp, one.pp) for one in every} == {(8, 1, 1)} and any(one.sp > 1 for one in every)


def test_dualpipev_needs_a_micro_batch_for_each_part():
    request = PlanRequest(precision="bf16", micro_batch=1, accumulation=4, schedule="dualpipev")
    assert {one.pp for one in layouts(make_profile(), make_cluster(), request)} == {2}
    with pytest.raises(UserError) as error:
        found(request=replace(request, pp=4))
    assert error.value.problems[0].hint == "use --gradient-accumulation-steps 8 or more"


@pytest.mark.parametrize(("gpus", "degrees"), [(1, {}), (4, {"pp": 1}), (4, {"tp": 2})])
def test_dualpipev_needs_a_pipeline(gpus, degrees):
    request = PlanRequest(precision="bf16", micro_batch=1, schedule="dualpipev", **degrees)
    with pytest.raises(UserError, match="dualpipev needs a pipeline"):
        found(cluster=make_cluster(gpus=gpus), request=request)


@pytest.mark.parametrize(("optimizer", "named"), [("adamw", True), ("adafactor", False)])
def test_a_remedy_is_one_that_the_optimizer_takes(optimizer, named):
    small = make_cluster(memory_bytes=15 * GIB)
    request = PlanRequest(precision="bf16", global_batch=8, tp=1, fixed={"optimizer": optimizer, "zero_stage": 0})
    profile = make_profile(80)
    hints = [one.hint for one in found(profile, small, request).rejections]
    assert hints and any("ZeRO" in hint for hint in hints) == named


def test_frozen_weights_are_not_saved():
    profile, saves = make_profile(), []
    frozen = replace(profile.layers[0], matrices=(8,), frozen=(profile.layers[0].matrices[0] - 8,))
    for one in (profile, replace(profile, layers=(frozen,))):
        saves.append(with_outlooks(found(one), Work(samples=1), one).layouts[0].outlook.goodput.save_s)
    assert saves[1] < 1e-4 * saves[0]


def test_padding_saves_no_more_than_the_slowest_stage_takes():
    profile = make_profile()
    product = Kernel(
        kind="product",
        dtype="bfloat16",
        count=1.0,
        flops=Linear(per_sample=2.0 * 1024 * 1023 * 1023),
        moved_bytes=Linear(per_sample=1.0),
        shape=(Linear(per_sample=1024), Linear(fixed=1023), Linear(fixed=1023)),
    )
    costs = {
        key: tuple(replace(one, forward_kernels=(product,) * 99, backward_kernels=(product,) * 99) for one in mine)
        for key, mine in profile.costs.items()
    }
    request = PlanRequest(precision="bf16", global_batch=512, pp=8, micro_batch=1)
    padding = found(replace(profile, costs=costs), request=request).padding
    assert 1 <= float(padding.partition(" saves ")[2].partition("%")[0]) < 100


def test_a_batch_that_does_not_divide():
    with pytest.raises(UserError) as error:
        found(request=PlanRequest(precision="bf16", global_batch=60, tp=1))
    assert error.value.problems[0].hint == "use 56 or 64"
    with pytest.raises(UserError):
        found(request=PlanRequest(precision="bf16", global_batch=64, micro_batch=3))


def test_an_engines_own_model_has_as_many_layers():
    profile = replace(make_profile(), own_models={"torchtitan": make_profile(3)})
    assert with_layers(profile, 5).of_engine("torchtitan").layers[0].count == 5
    assert profile.of_engine("torchtitan").layers[0].count == 3


def test_what_is_asked_is_kept():
    request = PlanRequest(precision="bf16", global_batch=64, micro_batch=2, checkpointing=True, tp=4)
    for layout in layouts(make_profile(), make_cluster(), request):
        assert (layout.micro_batch, layout.checkpointing, layout.tp, layout.dp) == (2, True, 4, 2)


def test_degrees_worth_tracing():
    assert settings_of((16, 8), "llama", 8) == [
        *(Degrees(), Degrees(tp=2), Degrees(sp=2), Degrees(tp=4), Degrees(sp=4), Degrees(tp=8), Degrees(sp=8))
    ]
    assert settings_of((12, 12), "bert", 8) == [Degrees(), Degrees(tp=2), Degrees(tp=4)]
    assert settings_of((None, None), None, 8) == [Degrees()]


@pytest.mark.parametrize("border", [1, 2, 3, 17, 1000, 4095, 4096, 5000])
@pytest.mark.parametrize("shape", [lambda n: n, lambda n: n * n, lambda n: 0.01 if n <= 1 else math.inf, math.sqrt])
@pytest.mark.parametrize("end_first", [True, False])
def test_the_largest_is_the_last_that_fits(border, shape, end_first):
    looked = []

    def wants(n: int) -> float:
        looked.append(n)
        return shape(n / (border + 0.5))

    value, looks = largest(wants, 1, 1, 4096, end_first)
    assert value == min(border, 4096) and looks == len(looked) == len(set(looked)) <= 40
    if value < 4096:
        assert value + 1 in looked and shape((value + 1) / (border + 0.5)) > 1


def test_nothing_is_small_enough():
    assert largest(lambda n: 2.0, 1, 1, 100)[0] is None


def test_the_largest_micro_batch_and_depth_are_the_last_that_fit():
    profile, cluster = make_profile(), make_cluster(memory_bytes=8 * GIB)

    def by_batch(micro: int) -> float:
        return pressure(profile, cluster, PlanRequest(precision="bf16", micro_batch=micro), Formula(profile))

    def by_depth(blocks: int) -> float:
        deeper = with_layers(profile, blocks)
        return pressure(deeper, cluster, REQUEST, Formula(deeper))

    for wants in (by_batch, by_depth):
        value, _ = largest(wants, 1, 1, 4096)
        assert wants(value) <= 1 < wants(value + 1)
    assert with_layers(profile, 20).layers[0].count == 20


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
@pytest.mark.parametrize("tp", [1, 8])
def test_what_is_far_too_large_needs_at_least_what_is_said_of_it(tp, optimizer):
    profile = make_profile(blocks=400)
    request = PlanRequest(precision="bf16", micro_batch=1, tp=tp, pp=2, fixed={"optimizer": optimizer})
    forecast = Forecaster(profile).memory
    for memory in (GIB, 12 * GIB):
        cluster = make_cluster(gpus=8, nodes=4, memory_bytes=memory)
        every = [family[0] for family in space_of(profile, cluster, request).families]
        least = min(check_fit(forecast(one), one, cluster).utilization for one in every)
        assert 0 < pressure(profile, cluster, request, forecast) <= least


def test_more_devices_never_fit_less():
    profile = make_profile(blocks=400)
    wants = []
    for nodes in (1, 2, 4, 8, 16):
        cluster = replace(make_cluster("l4", gpus=2, nodes=nodes), host_memory=7 * GIB)  # no room for offloading
        wants.append(pressure(profile, cluster, PlanRequest(precision="bf16", micro_batch=1), Formula(profile)))
    assert wants == sorted(wants, reverse=True) and wants[0] > 1 >= wants[-1]


@pytest.mark.parametrize(("enough", "found"), [(1, (1, 1)), (5, (5, 1)), (8, (8, 1)), (9, (8, 2)), (100, (8, 13))])
def test_the_fewest_devices_are_exact(enough, found):
    assert fewest(lambda gpus, nodes: enough / (gpus * nodes), 8) == found


def test_no_number_of_devices_is_enough():
    looked = []
    assert fewest(lambda gpus, nodes: looked.append(1) or 3.0, 8) is None and len(looked) < 16
    assert fewest(lambda gpus, nodes: 1e6 / (gpus * nodes), 8) is None


def test_stages_hold_every_layer_once():
    bounds = stage_bounds(make_profile(blocks=10), 4)
    assert bounds[0][0] == 0 and bounds[-1][1] == 10
    assert all(first[1] == second[0] for first, second in pairwise(bounds))


def test_most_of_ten_thousand_layouts_need_no_forecast():
    profile, cluster = make_profile(blocks=80), make_cluster(nodes=128)
    formula, request = Formula(profile), PlanRequest(precision="bf16", global_batch=2**10 * 3 * 5 * 7 * 11)
    answer = search(profile, cluster, request, formula)
    assert answer.considered > 10_000
    assert formula.calls < 0.4 * answer.considered  # benchmarks/plan_speed.py measures seconds


def test_memory_is_that_of_all_micro_batches_though_few_are_forecast():
    profile = make_profile()
    forecast = Forecaster(profile).memory
    ranked = [
        one
        for pp in (1, 2, 4)
        for one in search(profile, make_cluster(), replace(REQUEST, pp=pp, every=True), forecast, top=200).layouts
    ]
    assert {one.layout.pp for one in ranked if one.layout.accumulation > one.layout.pp + 1} == {1, 2, 4}
    for one in ranked:
        assert one.memory.peak_bytes == forecast(one.layout).peak_bytes, one.layout


def test_sequence_ranks_may_share_key_value_heads():
    """Ulysses repeats them, as in training; tensor parallelism does not."""
    profile = make_profile(heads=16, kv_heads=2)
    assert degree_problem(Degrees(sp=8), profile, make_cluster()) is None
    assert degree_problem(Degrees(tp=2, sp=4), profile, make_cluster()) is None
    assert degree_problem(Degrees(tp=4), profile, make_cluster()).hint == "possible degrees: 1, 2"
    six = make_profile(heads=24, kv_heads=6)
    assert "key-value heads" in degree_problem(Degrees(sp=4), six, make_cluster()).message
