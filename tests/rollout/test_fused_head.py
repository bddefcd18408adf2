"""ZeRO-3's gathered parameters with TRL's head, against DeepSpeed's coordinator in TRL's script."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerofit.models.shipped_profiles import shipped_profile
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.timeline import timeline
from zerofit.plan.zero3_gather import gathered_in_backward, gathered_in_forward, gathered_to_score
from zerofit.rollout.heads import with_fused_head
from zerofit.spec.profile import Profile, setting

MIB = 2**20
SETTING = setting("bf16", True, 1, 1)


def fused(model: str, layers: int) -> Profile:
    """The profile of a model with TRL's head, cut to some layers."""
    profile = shipped_profile(model, "cuda", "bf16", 1024)
    assert profile
    first, block, head = profile.layers
    return with_fused_head(replace(profile, layers=(first, replace(block, count=layers), head)), 512, 2, when="first")


def trainers(hidden: int) -> PlannedLayout:
    """ZeRO-3 with the sizes that the Trainer derives from the hidden size."""
    sizes = {"prefetch": int(0.9 * hidden * hidden), "persistence": 10 * hidden}
    return PlannedLayout(zero_stage=3, dp=4, micro_batch=2, precision="bf16", checkpointing=True, bucket=10**6, **sizes)


# MiB of gathered and arriving parameters that were counted in PartitionedParameterCoordinator.fetch_sub_module while
# `trl grpo` ran in `zerofit simulate` with 4 layers: the most in a forward, and at the head's backward
COUNTED = {"llama-3.2-1b": (2048, 945, 617), "qwen2.5-7b": (3584, 2079, 1929)}


@pytest.mark.parametrize("model", COUNTED)
def test_gathered_parameters_are_those_that_the_coordinator_gathers(model):
    hidden, forward, backward = COUNTED[model]
    line, layout = timeline(fused(model, 4), SETTING), trainers(hidden)
    assert max(gathered_in_forward(line, layout)) == gathered_to_score(line, layout)
    assert max(gathered_in_forward(line, layout)) / MIB == pytest.approx(forward, rel=0.02)
    assert gathered_in_backward(line, layout)[0] / MIB == pytest.approx(backward, rel=0.02)
