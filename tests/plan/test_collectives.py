"""Volumes and times of collectives against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.stub import make_cluster
from zerofit.plan.kernels import RankGroup, call_s, collective_s, group_of, sent_bytes
from zerofit.plan.rate_catalog import rate_catalog
from zerofit.plan.rates import Rates, rates_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.local_machine import Calibration

MB = 1_000_000


@pytest.fixture
def rates() -> Rates:
    """1 GB/s inside a node, 0.1 GB/s between nodes, calls that cost nothing."""
    found = rates_of(make_cluster(), "bf16")
    return replace(found, link=1e9, link_reduce=1e9, network=1e8, call_s=0.0, hop_s=0.0, network_hop_s=0.0)


@pytest.mark.parametrize(
    ("op", "ranks", "expected"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 100),  # each sends half, then half of the sum
        ("all_reduce", 4, 150),
        ("all_reduce", 8, 175),
        ("all_gather", 4, 75),
        ("reduce_scatter", 4, 75),
        ("reduce_scatter", 1024, 100 * 1023 / 1024),
        ("all_to_all", 8, 87.5),
        ("send", 2, 100),
    ],
)
def test_what_each_rank_sends(op, ranks, expected):
    assert sent_bytes(op, 100, ranks) == pytest.approx(expected)


def test_inside_a_node(rates):
    assert collective_s("all_reduce", 100 * MB, 1, RankGroup(4, 4), rates) == pytest.approx(0.150)
    assert collective_s("all_gather", 100 * MB, 1, RankGroup(8, 8), rates) == pytest.approx(0.0875)
    assert collective_s("all_reduce", 100 * MB, 1, RankGroup(1, 1), rates) == 0.0


def test_between_nodes_ranks_share_what_leaves(rates):
    # 2 nodes of 4: each rank takes a quarter of the 2 x 1/2 x 100 MB over the network at 0.1 GB/s
    assert collective_s("all_reduce", 100 * MB, 1, RankGroup(8, 4), rates) == pytest.approx(0.25)
    # one rank a node: all of it through its own adapter
    assert collective_s("all_reduce", 100 * MB, 1, RankGroup(2, 1), rates) == pytest.approx(1.0)
    # of an all-to-all, half of each rank's bytes goes to the other node
    assert collective_s("all_to_all", 100 * MB, 1, RankGroup(8, 4), rates) == pytest.approx(0.5)
    # a fast network leaves the node as the bottleneck
    fast = replace(rates, network=1e12)
    assert collective_s("all_reduce", 100 * MB, 1, RankGroup(8, 4), fast) == pytest.approx(0.175)


def test_groups_by_stride():
    assert group_of(32, 1, 8) == RankGroup(32, 8)
    assert group_of(4, 8, 8) == RankGroup(4, 1)  # data parallel peers of 8-way tensor parallel ranks
    assert group_of(16, 2, 8) == RankGroup(16, 4)
    assert group_of(2, 64, 8) == RankGroup(2, 1)  # pipeline stages of 64 ranks each
    assert group_of(8, 1, 8).nodes == 1 and group_of(32, 1, 8).nodes == 4


def test_each_call_costs(rates):
    slow = replace(rates, call_s=1e-3, hop_s=1e-4, network_hop_s=1e-5)
    assert call_s("all_gather", RankGroup(8, 8), slow) == pytest.approx(1e-3 + 7e-4)
    assert call_s("all_gather", RankGroup(16, 8), slow) == pytest.approx(1e-3 + 14e-4 + 1e-5)  # through both nodes
    assert call_s("all_reduce", RankGroup(8, 8), slow) == pytest.approx(1e-3 + 2 * 3e-4)
    assert collective_s("all_gather", 0, 5, RankGroup(8, 8), slow) == pytest.approx(5 * 1.7e-3)


def test_a_switch_adds_up_all_reduces():
    """480 GB/s of bus bandwidth on 8 H100 (nccl-tests) beside links of 450; four GPUs and an A100's have the ring's."""
    h100, a100 = (rates_of(Cluster(kind, gpus=8), "bf16") for kind in ("h100-80gb", "a100-80gb"))
    free = replace(h100, call_s=0.0, hop_s=0.0)
    assert 2 * 7 / 8 * 1e9 / collective_s("all_reduce", 1e9, 1, RankGroup(8, 8), free) == pytest.approx(480e9, rel=0.01)
    assert 7 / 8 * 1e9 / collective_s("all_gather", 1e9, 1, RankGroup(8, 8), free) == pytest.approx(351e9)
    assert 2 * 3 / 4 * 1e9 / collective_s("all_reduce", 1e9, 1, RankGroup(4, 4), free) == pytest.approx(351e9)
    assert a100.link_reduce == a100.link


def test_a_calibration_takes_the_place_of_assumptions():
    measured = Calibration(
        kind="h100-80gb", device_name="", devices=8, date="2026-01-02T00:00:00", matmul_flops={"bf16": 7e14}, link=3e11
    )
    found, assumed = rates_of(make_cluster(), "bf16", measured), rates_of(make_cluster(), "bf16")
    assert found.flops == pytest.approx(7e14 * rate_catalog()["model_shapes"]) and found.link == 3e11
    assert found.link_reduce == 3e11
    assert found.attention / assumed.attention == pytest.approx(found.flops / assumed.flops)
    assert found.sources["link"] == "measured here on 2026-01-02" and "nccl-tests" in assumed.sources["link"]
    assert found.memory == assumed.memory and found.peak == assumed.peak == 989e12


def test_every_rate_of_the_catalog_is_a_number_with_a_source():
    rates = rate_catalog()
    kernels = [entry for entries in rates["attention"]["kernels"].values() for entry in entries.values()]
    sections = [*rates["products"].values(), *rates["unaligned"].values(), *rates["rates"].values(), *kernels]
    entries = [entry for entry in sections if isinstance(entry, dict)]
    assert len(entries) > 50 and all(entry["source"] for entry in entries)
    for entry in entries:  # YAML reads 7e-6 as a text
        numbers = {name: value for name, value in entry.items() if name not in ("source", "date")}
        assert all(isinstance(value, int | float) for value in numbers.values()), entry
        assert "date" in entry or not entry["source"].startswith(("measured:", "measured by others"))
