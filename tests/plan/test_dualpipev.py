"""DualPipeV against DeepSpeed's own schedule, and the forecasts of layouts that have it."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule

from tests.plan.stub import make_cluster, make_profile
from zerofit.plan.dualpipev import PartSeconds, order, timed_passes
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.pipeline import most_in_flight, stage_parts
from zerofit.plan.rates import rates_of
from zerofit.plan.space import PlanRequest, space_of
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.time import Timer

WORDS = {
    schedule.ForwardPass: "F{}",
    schedule.BackwardPass: "B{}",
    schedule.SendActivation: "F{}>",
    schedule.RecvActivation: "<F{}",
    schedule.SendGrad: "B{}>",
    schedule.RecvGrad: "<B{}",
    schedule.CommitP2P: "|",
}


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 5), (4, 8), (4, 14)])
def test_the_order_is_deepspeeds(stages, micro_batches):
    for stage in range(stages):
        steps = schedule.DualPipeVSchedule(micro_batches, stages, stage).steps()
        own = [
            WORDS[type(one)].format(getattr(one, "phase", 0)) for step in steps for one in step if type(one) in WORDS
        ]
        assert list(order(stages, stage, micro_batches)) == own
        layout = PlannedLayout(zero_stage=1, micro_batch=1, pp=stages, accumulation=micro_batches, schedule="dualpipev")
        assert sum(most_in_flight(layout, stage)) == 2 * stages + 1


@pytest.mark.parametrize(("stages", "waits"), [(2, 2.0), (4, 7.0), (8, 17.0)])
def test_ranks_wait_as_long_as_deepspeeds_schedule_has_them(stages, waits):
    """benchmarks/pipeline_idle.py: 2.5 p - 3 of a stage's forwards, however many micro batches there are."""
    parts = [[PartSeconds(0.5, 1.0)] * 2] * stages
    for micro_batches in (2 * stages, 4 * stages):
        ends = max(one.end_s for one in timed_passes(parts, micro_batches, 0.0))
        assert ends - 3 * micro_batches == pytest.approx(waits)


def test_layouts_have_two_parts_a_stage_and_micro_batches_for_them():
    profile, cluster = make_profile(), make_cluster()
    request = PlanRequest(precision="bf16", global_batch=64, pp=2, schedule="dualpipev")
    layouts = [one for family in space_of(profile, cluster, request).families for one in family]
    assert {one.zero_stage for one in layouts} == {1} and min(one.accumulation for one in layouts) == 4
    first, last = stage_parts(profile, layouts[0])
    layers = sum(layer.count for layer in profile.layers)
    assert (first[0][0], first[1][1]) == (0, layers) and last[0][1] == last[1][0]
    timer = Timer(profile, cluster, rates_of(cluster, "bf16"))
    for layout in layouts[:3]:
        assert step_timeline(profile, timer, layout).step_s == pytest.approx(timer.step(layout).step_s)
