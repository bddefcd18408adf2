"""The time of a step on a hand-made profile: what each part is, and which way it goes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.stub import BLOCK, BLOCKS, make_cluster, make_profile
from zerofit.features.optimizer import ADAM_BYTES, SGD_BYTES
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.time import StepTime, Timer, model_flops
from zerofit.spec.cluster import Cluster
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Batch, Job, Layout

PARAMETERS = BLOCKS * BLOCK


@pytest.fixture
def timer() -> Timer:
    """Rates of round numbers, nothing costs by the call."""
    cluster = make_cluster()
    found = rates_of(cluster, "bf16")
    rates = replace(
        found,
        flops=1e14,
        memory=1e12,
        adam=1e12,
        launch_s=0.0,
        link=1e11,
        link_reduce=1e11,
        network=1e10,
        pcie=1e10,
        host=1e11,
        call_s=0.0,
        hop_s=0.0,
        network_hop_s=0.0,
        edge=0.0,
        engine_launch_s=0.0,
        gradient_s=0.0,
        streaming=math.inf,
    )
    return Timer(make_profile(), cluster, rates)


def choose(**fields: object) -> PlannedLayout:
    return PlannedLayout(**{"zero_stage": 1, "micro_batch": 1, "dp": 8, **fields})


def test_compute_is_products_and_the_traffic_between_them(timer):
    step = timer.step(choose())
    flops, out = 6 * PARAMETERS * 1024, 2 * 1024 * 1024
    assert step.compute_s == pytest.approx(flops / 1e14 + BLOCKS * 60 * out / 1e12)
    assert timer.step(choose(checkpointing=True)).compute_s > 1.2 * step.compute_s


def test_a_product_takes_the_larger_of_flops_and_traffic(timer):
    slow = Timer(make_profile(), make_cluster(), replace(timer.rates, flops=1e18))
    moved = BLOCKS * (6 * BLOCK + 60 * 2 * 1024 * 1024)
    assert slow.step(choose()).compute_s == pytest.approx(moved / 1e12)


def test_small_products_reach_less(timer):
    wasting = Timer(make_profile(), make_cluster(), replace(timer.rates, edge=100.0, memory=1e18))
    flops = 6 * PARAMETERS * 1024
    assert wasting.step(choose()).compute_s == pytest.approx(flops / 1e14 * (1 + 3 * 100 / 1024), rel=1e-4)


def test_gradients_are_all_reduced_below_stage_3_and_scattered_at_it(timer):
    reduce_s = 2 * PARAMETERS * 2 * 7 / 8 / 1e11
    assert timer.step(choose(zero_stage=0)).reduce_s == pytest.approx(reduce_s)
    assert timer.step(choose(zero_stage=2)).reduce_s == pytest.approx(reduce_s)
    assert timer.step(choose(zero_stage=3)).reduce_s == pytest.approx(reduce_s / 2)


def test_tensor_ranks_are_nearest_and_stages_farthest_apart(timer):
    """2 nodes of 8: each rank of a stage sends its activation over the network, all tensor ranks stay in a node."""
    layout = choose(tp=4, pp=2, dp=2, accumulation=2)
    slow = replace(timer.rates, network=timer.rates.network / 2)
    one, other = (Timer(make_profile(), make_cluster(nodes=2), rates).step(layout) for rates in (timer.rates, slow))
    sent = 2 * 2 * 1024 * 1024 / timer.rates.network  # forward and back
    assert other.step_s - one.step_s == pytest.approx(3 * sent)  # two micro batches, and a pipeline that fills
    assert (other.tensor_s, other.reduce_s) == (one.tensor_s, one.reduce_s) and one.tensor_s > 0


def test_stages_2_and_3_reduce_every_micro_batch(timer):
    once, often = (timer.step(choose(zero_stage=s, accumulation=4)).reduce_s for s in (1, 2))
    assert often == pytest.approx(4 * once)


def test_overlap_hides_gradients_but_for_the_last_bucket(timer):
    exposed = timer.step(choose(zero_stage=2))
    hidden = timer.step(choose(zero_stage=2, overlap=True, bucket=1_000_000))
    assert 0 < hidden.reduce_s < exposed.reduce_s and hidden.step_s < exposed.step_s


def test_the_optimizer(timer):
    gathered = 2 * PARAMETERS * 7 / 8 / 1e11
    assert timer.step(choose(zero_stage=0)).optimizer_s == pytest.approx(PARAMETERS * ADAM_BYTES / 1e12)
    assert timer.step(choose()).optimizer_s == pytest.approx(PARAMETERS / 8 * ADAM_BYTES / 1e12 + gathered)
    offloaded = timer.step(choose(zero_stage=3, offload_optimizer="cpu"))
    assert offloaded.optimizer_s == pytest.approx(PARAMETERS * (ADAM_BYTES + 2) / 1e11)  # shared
    # gradients down and up in bf16, down in float32, stepped parameters up
    assert offloaded.transfer_s == pytest.approx((2 * 2 + 4 + 2) * PARAMETERS / 8 / 1e10)


def test_sgd_steps_at_its_own_rate_and_moves_less_to_disks(timer):
    rates = replace(timer.rates, sgd=2e12)
    one = Timer(make_profile(), make_cluster(), rates).step(choose(zero_stage=0, optimizer="sgd"))
    assert one.optimizer_s == pytest.approx(PARAMETERS * SGD_BYTES / 2e12)
    disks = {"zero_stage": 3, "offload_optimizer": "nvme"}
    adam, sgd = (timer.step(choose(**disks, optimizer=name)) for name in ("adamw", "sgd"))
    read_and_written = 4 * PARAMETERS * (1 / rates.nvme_read + 1 / rates.nvme_write)  # one moment in float32
    assert adam.transfer_s - sgd.transfer_s == pytest.approx(read_and_written)


@pytest.mark.parametrize("stage", [0, 1])
def test_autograd_adds_gradients_of_later_micro_batches(timer, stage):
    own = Timer(make_profile(), make_cluster(), replace(timer.rates, streaming=1e12))
    for layout in (choose(zero_stage=stage, accumulation=3), choose(zero_stage=stage, pp=4, dp=2, accumulation=5)):
        extra_s = own.step(layout).reduce_s - own.step(replace(layout, accumulation=1)).reduce_s
        parameters = own.parts(layout).rank_pass.trained_parameters
        assert extra_s == pytest.approx((layout.accumulation - 1) * 3 * 2 * parameters / 1e12)


def test_the_engine_passes_over_gradients_and_masters(timer):
    """In bf16 16 bytes of all gradients and 6 of the share, 6 more where they are added; in the step 48 but 12."""
    rates = replace(timer.rates, streaming=1e12, engine_launch_s=1e-5)
    own = Timer(make_profile(), make_cluster(), rates)
    for accumulation in (1, 3):
        layout = choose(zero_stage=2, accumulation=accumulation)
        plain, step = timer.step(layout), own.step(layout)
        passed = accumulation * (16 + 6 / 8) + (accumulation - 1) * 6 / 8
        assert step.reduce_s - plain.reduce_s == pytest.approx(PARAMETERS * passed / 1e12)
        stepped = PARAMETERS / 8 * 36 / 1e12  # launches are hidden by what the device has to do
        assert step.optimizer_s - plain.optimizer_s == pytest.approx(stepped)
        assert step.step_s == pytest.approx(plain.step_s + PARAMETERS * passed / 1e12 + stepped)


def test_launches_of_the_step_run_ahead_of_a_device_that_is_behind(timer):
    """15 for each parameter of the rank's share, and others; without ZeRO each parameter is waited for."""
    own = Timer(make_profile(), make_cluster(), replace(timer.rates, engine_launch_s=1e-3))
    for stage, accumulation, launches in ((0, 2, 15 * BLOCKS + 10), (1, 1, 15 + 84), (2, 3, 15 + 84)):
        layout = choose(zero_stage=stage, accumulation=accumulation)
        plain = timer.step(layout)
        ahead_s = plain.compute_s if stage else 0.0
        assert own.step(layout).optimizer_s - plain.optimizer_s == pytest.approx(1e-3 * launches - ahead_s)


def test_zero_3_with_one_rank_waits_for_each_parameter_that_it_fetches(timer):
    slow, plain = (Timer(make_profile(), make_cluster(), replace(timer.rates, hook_s=s)) for s in (1.0, 0.0))
    alone, two = (choose(zero_stage=3, dp=dp) for dp in (1, 2))
    assert slow.step(two).compute_s == pytest.approx(2 * BLOCKS * 1.0)  # forward and backward
    assert slow.step(alone).compute_s == pytest.approx(2 * BLOCKS * 1.0 + plain.step(alone).compute_s)


def test_gradients_take_the_host_where_zero_handles_them_one_by_one(timer):
    slow = Timer(make_profile(), make_cluster(), replace(timer.rates, gradient_s=1.0))
    assert slow.step(choose(zero_stage=0)) == timer.step(choose(zero_stage=0))
    one = timer.parts(choose(zero_stage=1)).rank_pass
    forward_s = sum(n * one.forward[i].layer_s for i, n in one.slowest)
    assert slow.step(choose(zero_stage=1)).compute_s == pytest.approx(BLOCKS * 1.0 + forward_s)


def test_stage_2_moves_whole_gradients_of_earlier_micro_batches(timer):
    step = timer.step(choose(zero_stage=2, offload_optimizer="cpu", accumulation=3))
    moved = 5 * 2 * PARAMETERS + (4 + 2) * PARAMETERS / 8
    assert step.transfer_s == pytest.approx(moved / 1e10)


def test_disks_are_the_slowest(timer):
    nvme = timer.step(choose(zero_stage=3, offload_optimizer="nvme"))
    assert nvme.transfer_s > 2 * timer.step(choose(zero_stage=3, offload_optimizer="cpu")).transfer_s


@pytest.mark.parametrize(("stage", "place"), [(1, "cpu"), (2, "cpu"), (3, "nvme")])
def test_deepspeed_uses_disks_at_stage_3_only(stage, place):
    states = {"device": "nvme", "nvme_path": "/disk"}
    job = Job(
        run=Run(model="mlp"),
        layout=Layout(dp=1, zero_stage=stage),
        batch=Batch(micro=1, accumulation=1, dp=1),
        steps=1,
        facts=ModelFacts(task="image", parameters=1, largest_parameter=1, hidden_size=1, forward_flops=None),
        ds_config={"zero_optimization": {"stage": stage, "offload_optimizer": states}},
    )
    assert PlannedLayout.of(job).offload == f"optimizer:{place}"


def test_a_pipeline_waits_to_fill(timer):
    step = timer.step(choose(dp=2, pp=4, accumulation=8))
    assert step.bubble_s == pytest.approx(3 / 8 * step.compute_s, rel=0.1)  # and what stages hand on
    longer = timer.step(choose(dp=2, pp=4, accumulation=32))
    assert longer.bubble_s / longer.step_s < step.bubble_s / step.step_s


def test_tensor_and_sequence_parallelism_send_in_both_directions(timer):
    out = 2 * 1024 * 1024  # bytes of a block's output for one sample
    step = timer.step(choose(dp=4, tp=2))
    assert step.tensor_s == pytest.approx(BLOCKS * 2 * (2 * out) * 2 * 1 / 2 / 1e11)
    again = timer.step(choose(dp=4, tp=2, checkpointing=True))
    assert again.tensor_s == pytest.approx(1.5 * step.tensor_s)
    step = timer.step(choose(dp=4, sp=2))
    assert step.sequence_s == pytest.approx(BLOCKS * 2 * (4 * out / 2) * 1 / 2 / 1e11)


def test_checkpoints_go_to_the_host_and_come_back(timer):
    layout = choose(dp=8, accumulation=4, checkpointing=True)
    hosted = Timer(make_profile(on_host=True), make_cluster(), timer.rates)
    copied_s = 4 * BLOCKS * 2 * (layout.micro_batch * 2 * 1024 * 1024) / timer.rates.pcie
    before, after = timer.step(layout), hosted.step(layout)
    assert after.transfer_s - before.transfer_s == pytest.approx(copied_s)
    assert after.step_s - before.step_s == pytest.approx(copied_s)
    assert after.compute_s == pytest.approx(before.compute_s)
    assert hosted.step(choose(dp=8)) == timer.step(choose(dp=8))


@pytest.mark.parametrize("stage, accumulation", [(2, 1), (2, 4), (3, 2)])
def test_what_is_not_page_locked_is_copied_at_the_speed_of_pageable_memory(timer, stage, accumulation):
    pinned = choose(zero_stage=stage, offload_optimizer="cpu", accumulation=accumulation)
    pageable = replace(pinned, pin_optimizer=False)
    # to the host: float32 gradients of a rank's share; back: its stepped parameters; stage 2 accumulates all of them
    moved = (4 + 2) * PARAMETERS / 8
    if accumulation > 1:
        moved += (2 * accumulation - 1 + (stage == 3)) * 2 * PARAMETERS * (1 / 8 if stage == 3 else 1)
    before, after = timer.step(pinned), timer.step(pageable)
    assert after.transfer_s == pytest.approx(moved / 7.2e9)
    assert after.step_s - before.step_s == pytest.approx(moved / 7.2e9 - moved / timer.rates.pcie)
    slow = Timer(make_profile(), make_cluster(), replace(timer.rates, pcie=1e9))
    assert slow.step(pageable) == slow.step(pinned)  # page-locked copies are no faster there


OWN = "memory: 96GiB\ntflops: {bf16: 989, fp32: 67}\nbandwidth: 4TB\nlink: 450GB\nnetwork: 50GB\ngpus: 1\n"


def step_on(path: Path, layout: PlannedLayout, text: str) -> StepTime:
    """The step on a device that a file describes."""
    path.write_text(OWN + text)
    cluster = Cluster(str(path))
    return Timer(make_profile(), cluster, rates_of(cluster, "bf16")).step(layout)


def test_a_device_files_host_decides_what_offloading_takes(tmp_path):
    """One rank offloads its optimizer at stage 3: gradients go down in float32, stepped parameters up in bf16."""
    layout, file = choose(zero_stage=3, dp=1, offload_optimizer="cpu"), tmp_path / "own.yaml"
    slow = step_on(file, layout, "pcie: 63GB\nhost_bandwidth: 256GB\n")
    link = step_on(file, layout, "pcie: 450GB\nhost_bandwidth: 256GB\n")
    host = step_on(file, layout, "pcie: 63GB\nhost_bandwidth: 512GB\n")
    copied, stepped = (
        (2 * 2 + 4 + 2) * PARAMETERS / 0.8,
        (ADAM_BYTES + 2) * PARAMETERS / 0.43,
    )  # shares that are reached
    assert slow.step_s - link.step_s == pytest.approx(copied * (1 / 63e9 - 1 / 450e9))
    assert slow.step_s - host.step_s == pytest.approx(stepped * (1 / 256e9 - 1 / 512e9))


@pytest.mark.parametrize(
    ("kind", "gpus", "link", "host"),
    [("gh200", 1, 450e9, 512e9), ("gh200", 4, 450e9, 2048e9), ("gb200", 4, 225e9, 1024e9)],
)
def test_superchips_copy_over_nvlink_c2c(kind, gpus, link, host):
    """Each Grace CPU has its own link and memory; two GPUs of a GB200 share them."""
    rates = rates_of(make_cluster(kind, gpus=gpus), "bf16")
    assert (rates.pcie, rates.host) == (pytest.approx(0.75 * link), pytest.approx(0.68 * host))
    assert rates.host_copy(pinned=False) == rates.pcie


def test_superoffload_steps_beside_backward_where_nothing_is_clipped(timer):
    """Four groups, each of which the host steps in a, beside a backward of B: done at B + a, or B/4 + 4a if slower."""
    many = make_profile(blocks=24)
    elements = 24 * BLOCK
    plain, early = (choose(zero_stage=3, dp=1, offload_optimizer="cpu", steps_early=early) for early in (False, True))
    for host, slower in ((1e13, False), (1e11, True)):
        own = Timer(many, make_cluster(gpus=1), replace(timer.rates, host=host))
        after, backward_s = own.step(plain), own.parts(plain).rank_pass.backward_s
        step_s = (ADAM_BYTES + 2) * elements / host
        left_s = backward_s / 4 + step_s - backward_s if slower else step_s / 4  # 302 million elements: four groups
        assert (step_s / 4 > backward_s / 4) == slower
        assert own.step(early).step_s == pytest.approx(after.step_s - step_s + left_s)


def test_slower_hardware_is_never_faster(timer):
    for name in ("flops", "memory", "link", "pcie", "host", "attention"):
        slow = Timer(make_profile(), make_cluster(), replace(timer.rates, **{name: getattr(timer.rates, name) / 4}))
        for layout in (choose(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"), choose(zero_stage=2)):
            assert slow.step(layout).step_s >= timer.step(layout).step_s


def test_model_flops_leave_recomputation_out():
    assert model_flops(make_profile(), "bf16") == 6 * PARAMETERS * 1024


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 0},
        {"zero_stage": 2, "accumulation": 4},
        {"zero_stage": 2, "overlap": True, "bucket": 1_000_000},
        {"zero_stage": 3, "checkpointing": True},
        {"zero_stage": 3, "overlap": True, "offload_optimizer": "cpu"},
        {"tp": 4},
        {"pp": 4, "accumulation": 8},
        {"sp": 2, "zero_stage": 3},
    ],
)
def test_a_step_is_no_shorter_than_its_longest_stream_and_no_longer_than_their_sum(timer, fields, nodes):
    cluster = make_cluster(nodes=nodes)
    ranks = cluster.ranks // (fields.get("tp", 1) * fields.get("pp", 1) * fields.get("sp", 1))
    free = {
        "computing": {"link": 1e18, "network": 1e18, "pcie": 1e18},
        "sending": {"flops": 1e24, "memory": 1e24, "attention": 1e24, "host": 1e24},
    }
    layout = choose(**{**fields, "dp": ranks})
    both = Timer(make_profile(), cluster, timer.rates).step(layout).step_s
    computing, sending = (
        Timer(make_profile(), cluster, replace(timer.rates, **rates)).step(layout).step_s for rates in free.values()
    )
    assert max(computing, sending) <= both <= computing + sending
