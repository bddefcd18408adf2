"""Simulations and plans know averaged weights, mixed targets, batch norms that meet, and a class for each pixel."""

from __future__ import annotations

import pytest
import torch

from tests.simulate.targets import cluster, end_bytes, sent, target
from zerofit.app.planning.planner import plan
from zerofit.models.batch_norm import batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.record import RankRecord
from zerofit.spec.memory_kinds import LOGITS

RANKS, MICRO, ARGS = 2, 2, {"width": 4}
NET = {"model": "resnet18-small", "model_args": ARGS, "image": "image:3x16x16", "micro_batch": MICRO}


@pytest.fixture(scope="module")
def records() -> dict[str, RankRecord]:
    made = {
        "plain": target("zero2", **NET),
        "averaged": target("zero2", **NET, ema=0.9),
        "mixed and met": target("zero0", **NET, mixup=0.2, sync_batch_norm=True),
        "mixed, of a smaller share": target(
            "zero0", **{**NET, "micro_batch": None}, mixup=0.2, micro_batch_by_rank="1,3"
        ),
        "on a GPU": target("zero0", kind="a100-40gb", **{**NET, "precision": "bf16"}, sync_batch_norm=True, ema=0.9),
        "masks": target("zero2", model="fcn-tiny", model_args=ARGS, image="image:3x32x32", micro_batch=MICRO),
    }
    found = dict(zip(made, simulate_all(list(made.values()), lambda text: None), strict=True))
    assert all(isinstance(one, RankRecord) for one in found.values()), found
    return found


def test_averages_take_what_the_rank_steps_on_and_buffers(records):
    with torch.device("meta"):
        model = build(find("resnet18-small"), ImageInputs(channels=3, size=16, classes=10), ARGS)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    stretches = sum(sum(p.numel() for p in group) for group in groups) / RANKS
    buffers = sum(b.numel() for norm in batch_norms(model) for b in (norm.running_mean, norm.running_var))
    added = end_bytes(records["averaged"]) - end_bytes(records["plain"])
    assert added == pytest.approx(4 * (stretches + buffers), rel=0.01)
    least, static = (
        plan("resnet18-small", cluster(RANKS), **{"model_args": ARGS, "zero_stage": 2, "micro_batch": 2, **more})
        .layouts[0]
        .memory.static_bytes
        for more in ({}, {"ema": 0.9})
    )
    assert static - least == pytest.approx(4 * stretches, rel=0.01)


def test_batch_norms_of_all_ranks_meet(records):
    norms = 20  # of the ResNet-18
    with torch.device("meta"):
        model = build(find("resnet18-small"), ImageInputs(channels=3, size=16, classes=10), ARGS)
    channels = sum(norm.num_features for norm in batch_norms(model))
    assert len(batch_norms(model)) == norms
    for name in ("mixed and met", "on a GPU"):
        assert any(
            4 * (2 * channels + norms) in (size, RANKS * size) or size == 4 * RANKS * (2 * channels + norms)
            for size in sent(records[name], "forward").values()
        ), sent(records[name], "forward")


def test_logits_of_each_pixel_are_counted(records):
    loss = max(peak.breakdown.get(LOGITS, 0) for peak in records["masks"].peaks)
    assert loss >= 4 * MICRO * 4 * 32 * 32  # of 4 classes
