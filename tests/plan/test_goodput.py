"""Failures and checkpoints: closed forms against each other, against drawn months, and against a published run."""

from __future__ import annotations

import json
import math

import pytest

from zerofit.plan.goodput import (
    GPU_MTBF_H,
    MONTH_S,
    Failures,
    Reliability,
    checkpoint_bytes,
    daly_interval,
    draw_months,
    goodput,
    goodput_of,
    spare_nodes,
    young_interval,
)
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import PublishedErrors, Work, outlook_of
from zerofit.spec.cluster import Cluster

DAY = 86400.0


def failures(mtbf_s: float = 3 * 3600, save_s: float = 30, restart_s: float = 120, repair_s: float = 0) -> Failures:
    return Failures(mtbf_s=mtbf_s, save_s=save_s, restart_s=restart_s, repair_s=repair_s)


def best_by_search(one: Failures) -> float:
    """The interval with the highest goodput, by golden section."""
    low, high = 1e-6 * one.mtbf_s, 10 * one.mtbf_s
    ratio = (math.sqrt(5) - 1) / 2
    while high / low > 1 + 1e-9:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if goodput(a, one) > goodput(b, one) else (a, high)
    return low


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.02, 0.2, 1.0])
def test_dalys_interval_is_the_best_one(share):
    one = failures(save_s=share * 3 * 3600)
    assert goodput(daly_interval(one.save_s, one.mtbf_s), one) >= 0.999 * goodput(best_by_search(one), one)
    if share <= 1e-3:
        assert daly_interval(one.save_s, one.mtbf_s) == pytest.approx(best_by_search(one), rel=1e-3)
        assert daly_interval(one.save_s, one.mtbf_s) == pytest.approx(young_interval(one.save_s, one.mtbf_s), rel=0.03)


def test_the_interval_of_young_by_hand():
    assert young_interval(20, 3600) == pytest.approx(math.sqrt(2 * 20 * 3600)) == pytest.approx(379.47, abs=0.01)
    # Daly (2006), equation 37, by hand: 379.47 (1 + sqrt(1/360)/3 + 1/3240) - 20
    assert daly_interval(20, 3600) == pytest.approx(379.47 * (1 + 0.0175682 + 0.00030864) - 20, abs=0.05)
    assert daly_interval(100, 50) == 50


@pytest.mark.parametrize(("save_s", "restart_s", "interval_s"), [(30, 120, None), (5, 600, None), (60, 60, 7200)])
def test_drawn_months_have_the_mean_of_the_closed_form(save_s, restart_s, interval_s):
    one = failures(save_s=save_s, restart_s=restart_s)
    interval_s = interval_s or one.interval_s
    months = draw_months(one, interval_s, 0, length_s=4 * MONTH_S)
    error = months.std() / math.sqrt(len(months))
    # 4 standard errors, and what the beginning of the stretch, without a restart, makes of one interval
    assert abs(months.mean() - goodput(interval_s, one)) < 4 * error + (interval_s + restart_s) / (4 * MONTH_S)


def test_without_spare_nodes_training_waits_for_repairs():
    one = failures(save_s=0.001, restart_s=0, repair_s=3600, mtbf_s=20 * 3600)
    # an hour of waiting after each 20 hours: nothing else is lost
    assert draw_months(one, one.interval_s, 0).mean() == pytest.approx(20 / 21, abs=0.005)
    assert draw_months(one, one.interval_s, 5).mean() > 0.998
    some = draw_months(one, one.interval_s, 1).mean()
    assert 20 / 21 + 0.02 < some < 0.9995


def test_spare_nodes_cover_those_in_repair():
    # of a Poisson distribution with mean 1 are P(X <= 4) = 0.99634 and P(X <= 3) = 0.98101
    assert spare_nodes(1.0, 0.99) == 4
    assert spare_nodes(0.001, 0.99) == 0
    assert spare_nodes(500, 0.99) == pytest.approx(spare_nodes(501, 0.99), abs=3)


def test_a_month_on_16384_gpus_is_that_of_llama_3():
    # 54 days, 419 unexpected interruptions, "higher than 90% effective training time" (arXiv:2407.21783, 3.3.4)
    cluster = Cluster("h100-80gb", gpus=8, nodes=2048)
    layout = PlannedLayout(zero_stage=1, micro_batch=1, dp=128, tp=8, pp=16)
    one = Reliability(storage=2e12).failures(405_000_000_000, layout, cluster)
    assert 54 * DAY / one.mtbf_s == pytest.approx(419)
    found = goodput_of(one)
    assert found.failures_a_day == pytest.approx(7.76, abs=0.01) and 8 < found.spare_nodes < 20
    assert 0.9 < found.low < found.share < 1 and found.low < found.high < 1
    assert found.share + found.saving + found.lost == pytest.approx(1) and found.saving > 0 < found.lost


def test_hours_of_a_node_or_of_a_gpu():
    cluster = Cluster("h100-80gb", gpus=8, nodes=4)
    layout = PlannedLayout(zero_stage=3, micro_batch=1, dp=32)
    by_gpu = Reliability(mtbf_h=800).failures(10**9, layout, cluster)
    by_node = Reliability(mtbf_h=100, of_node=True).failures(10**9, layout, cluster)
    assert by_gpu.mtbf_s == by_node.mtbf_s == 25 * 3600
    default = Reliability().failures(10**9, layout, cluster)
    assert default.mtbf_s == pytest.approx(3600 * GPU_MTBF_H.value / 32)
    assert set(Reliability().sources) == {"mtbf", "save", "restart", "repair"}
    assert set(Reliability(mtbf_h=1, save_s=1, restart_s=1).sources) == {"repair"}


def test_what_a_save_writes():
    p = 10**9
    each = {s: checkpoint_bytes(p, PlannedLayout(zero_stage=s, micro_batch=1, dp=8)) for s in range(4)}
    # fp32 master and two moments, and below stage 3 bf16 weights
    assert [whole for whole, _ in each.values()] == [14 * p, 14 * p, 14 * p, 12 * p]
    assert [most for _, most in each.values()] == [14 * p, 2 * p + 12 * p / 8, 2 * p + 12 * p / 8, 12 * p / 8]
    parts = checkpoint_bytes(p, PlannedLayout(zero_stage=1, micro_batch=1, dp=2, tp=2))[1]
    assert parts == 2 * p / 2 + 12 * p / 4
    lion = PlannedLayout(zero_stage=0, micro_batch=1, precision="fp32", optimizer="lion")
    assert checkpoint_bytes(p, lion)[0] == 8 * p


@pytest.mark.parametrize("mtbf_s", [1e-3, 1.0, 1e12])
def test_hopeless_and_perfect_machines(mtbf_s):
    found = goodput_of(failures(mtbf_s=mtbf_s, repair_s=DAY))
    assert 0 <= found.share <= 1 and 0 <= found.low <= found.high <= 1 and found.save_every_s > 0
    assert found.share < 1e-3 if mtbf_s < 10 else found.share > 0.999


@pytest.mark.parametrize(("mtbf_h", "ends"), [(1e-5, False), (1e4, True)])
def test_a_training_that_never_ends_has_no_hours(mtbf_h, ends):
    work = Work(samples=100, prices={"": 1.0}, reliability=Reliability(mtbf_h=mtbf_h))
    errors, cluster = PublishedErrors("some", 1, 0.9, 1.1), Cluster("h100-80gb")
    found = outlook_of(work, PlannedLayout(zero_stage=0, micro_batch=1), 1.0, errors, 10**9, 1024, cluster)
    each = (found.hours, found.hours_range, found.gpu_hours, found.cost)
    assert found.steps == 100 and [one is not None for one in each] == 4 * [ends]
    json.dumps(found.to_dict(), allow_nan=False)
