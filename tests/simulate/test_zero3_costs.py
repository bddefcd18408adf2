"""What a step costs otherwise at ZeRO-3 than at the other stages, as a profile and a plan have it."""

from tests.models.small import NAMED
from zerofit.models.catalog import find
from zerofit.models.inputs import Fed
from zerofit.models.named_inputs import named_inputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import forecast
from zerofit.simulate.profile import TraceSetting, profile_model
from zerofit.spec.profile import ZERO3, Profile, setting


def traced(name: str) -> Profile:
    args = {**NAMED[name], "vocab_size": 2048}
    inputs = named_inputs(find(name), args, 16, Fed())
    return profile_model(find(name), "seq2seq-lm", inputs, args, [TraceSetting("bf16")], "cpu")


def test_the_logits_of_bart_stay_low_at_stage_3():
    """A float32 bias makes float32 logits: 2 bytes more for each, of which one copy at least lives at the peak."""
    profile, key = traced("bart-base"), setting("bf16", False, 1, 1)
    assert profile.key_of(key, 2) == key and profile.key_of(key, 3) == key + ZERO3
    assert Profile.from_dict(profile.as_dict()) == profile
    high, low = (profile.costs_of(profile.key_of(key, stage))[-1].backward_peak_bytes.per_sample for stage in (2, 3))
    assert high - low >= 2 * 16 * 2048
    without = Profile.from_dict({**profile.as_dict(), "zero3": {}})
    layout = PlannedLayout(zero_stage=3, micro_batch=8, dp=2, precision="bf16")
    saved = forecast(without, layout, "cpu").peak_bytes - forecast(profile, layout, "cpu").peak_bytes
    assert saved >= 8 * 2 * 16 * 2048


def test_a_model_without_such_buffers_is_traced_once():
    assert not traced("t5-small").zero3
