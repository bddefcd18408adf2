"""What a step costs otherwise at ZeRO-3 than at the other stages, as a profile and a plan have it."""

from typing import Any

import pytest

from benchmarks.meter.planned import planned, traced
from tests.models.small import NAMED
from tests.simulate.targets import sent, target
from zerofit.models.catalog import find
from zerofit.models.inputs import Fed
from zerofit.models.named_inputs import named_inputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import forecast
from zerofit.plan.timeline import timeline
from zerofit.plan.zero3_gather import fetches
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.spec.profile import ZERO3, Profile, setting


def profile_of(name: str) -> Profile:
    args = {**NAMED[name], "vocab_size": 2048}
    inputs = named_inputs(find(name), args, 16, Fed())
    return profile_model(find(name), "seq2seq-lm", inputs, args, [TraceSetting("bf16")], "cpu")


def test_the_logits_of_bart_stay_low_at_stage_3():
    """A float32 bias makes float32 logits: 2 bytes more for each, of which one copy at least lives at the peak."""
    profile, key = profile_of("bart-base"), setting("bf16", False, 1, 1)
    assert profile.key_of(key, 2) == key and profile.key_of(key, 3) == key + ZERO3
    assert Profile.from_dict(profile.as_dict()).as_dict() == profile.as_dict()
    high, low = (profile.costs_of(profile.key_of(key, stage))[-1].backward_peak_bytes.per_sample for stage in (2, 3))
    assert high - low >= 2 * 16 * 2048
    without = Profile.from_dict({**profile.as_dict(), "zero3": {}})
    layout = PlannedLayout(zero_stage=3, micro_batch=8, dp=2, precision="bf16")
    saved = forecast(without, layout, "cpu").peak_bytes - forecast(profile, layout, "cpu").peak_bytes
    assert saved >= 8 * 2 * 16 * 2048


def test_a_model_without_such_buffers_is_traced_once():
    assert not profile_of("t5-small").zero3


GPT2 = {"model": "gpt2", "model_args": {"n_layer": 6}, "freeze": ["transformer.wte", "transformer.h.[0-3]"]}
LLAMA = {"model": "llama-3.1-8b", "model_args": {"num_hidden_layers": 4}}
ZERO = {"stage": 3, "stage3_max_live_parameters": 5e8, "stage3_max_reuse_distance": 0}
FEW = {"zero_optimization": ZERO, "bf16": {"enabled": True}}
CASES: list[dict[str, Any]] = [
    GPT2,
    LLAMA,
    {**LLAMA, "activation_checkpointing": True},
    {**LLAMA, "config": FEW},
]


def test_plan_gathers_what_the_engine_gathers():
    """Frozen layers below a tied head; a limit of live parameters, to which fetching runs.

    A parameter that the first module of the backward fetches, when the loss has had its own, counts beside that, too.
    """
    more = {"config": "zero3", "precision": "bf16", "seq_len": 128, "gpus": 4, "kind": "h100-80gb"}
    targets = [target(**{**more, **case}) for case in CASES]
    for one, record in zip(targets, simulate_all(targets, lambda text: None), strict=True):
        more_bytes = planned(one).peak_bytes - record.peaks[0].bytes
        assert -100 <= more_bytes <= (2 * 4096 * 14336 if one.job.run.ds_config == FEW else 0)


@pytest.mark.parametrize(
    ("live", "reuse", "times"),
    # elements; how often the backward gathers a layer of 0.22e9 that it recomputes: never, once, some twice, most twice
    [(5e9, 5e9, (0.0, 0.0)), (2e8, 2e8, (1.0, 1.2)), (1e8, 1e8, (1.2, 1.6)), (1e7, 0, (1.6, 2.0))],
)
def test_plan_counts_the_bytes_that_the_engine_gathers(live, reuse, times):
    """The reference is the engine itself: its all-gathers in forward and in backward, of a layer once or twice."""
    sizes = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse}
    config = {"zero_optimization": {"stage": 3, **sizes}, "bf16": {"enabled": True}}
    few = {"precision": "bf16", "seq_len": 128, "gpus": 4, "kind": "h100-80gb", "activation_checkpointing": True}
    one = target(config, **LLAMA, **few)
    (record,) = simulate_all([one], lambda text: None)
    profile, layout = traced(one), PlannedLayout.of(one.job)
    counted = fetches(timeline(profile, profile.key_of(layout.setting, 3), None, 0), layout)
    forward, backward = (sum(layer.bytes for layer in layers) for layers in counted)
    assert forward == pytest.approx(sent(record, "forward")["allgather_base"], rel=0.001)
    assert backward == pytest.approx(sent(record, "backward").get("allgather_base", 0), rel=0.001)
    block = counted[1][2].bytes / (2 * sum(profile.layers[1].matrices))
    assert times[0] <= block <= times[1]


def test_an_embedding_is_whole_while_the_last_gradients_are_reduced():
    """Its input are indices, which have no gradient: DeepSpeed sees no end of its backward."""
    small = {"model": "llama-tiny", "model_args": {"vocab_size": 8192, "hidden_size": 192}, "micro_batch": 1}
    one = target(config="zero3", seq_len=16, activation_checkpointing=True, **small)
    (record,) = simulate_all([one], lambda text: None)
    found = planned(one)
    assert (found.peak_phase, record.peaks[0].phase) == ("backward", "backward")
    assert found.breakdown["temporaries"] > 2 * 4 * 8192 * 192  # the bucket, and gloo's copy of it
    assert -500 <= found.peak_bytes - record.peaks[0].bytes <= 0
