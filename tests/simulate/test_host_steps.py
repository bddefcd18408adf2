"""SuperOffload in a simulation: the engine's own optimizer, and its process's memory."""

from __future__ import annotations

import pytest

import zerofit as zf
from zerofit.config.ds_json import read_for_run
from zerofit.spec.errors import UserError

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
RUN = {"model": "llama-tiny", "model_args": TINY, "seq_len": 32, "micro_batch": 2, "precision": "bf16"}


def simulated(config: object, clipping: float) -> zf.Simulation:
    run = zf.Run(**RUN, ds_config=config, gradient_clipping=clipping)
    return zf.simulate(run, zf.Cluster("gh200", gpus=1))


def test_superoffload_takes_the_device_that_offloading_takes_and_a_buffer_more_of_the_host():
    plain = read_for_run("superoffload").config
    del plain["zero_optimization"]["offload_optimizer"]["super_offload"]
    del plain["zero_optimization"]["offload_optimizer"]["cpuadam_cores_perc"]
    offloaded, early, clipped = (
        simulated(*asked) for asked in ((plain, 0.0), ("superoffload", 0.0), ("superoffload", 1.0))
    )
    assert early.peak_bytes == clipped.peak_bytes == offloaded.peak_bytes
    assert early.host_bytes["pageable"] == offloaded.host_bytes["pageable"] > 0  # masters and moments
    assert early.host_bytes["pinned"] > offloaded.host_bytes["pinned"]  # of its process, for one group's gradients


ZEROPP = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}


@pytest.mark.parametrize(
    ("config", "message", "instead"),
    [("zenflow", "ZenFlow cannot be simulated", "zero3_offload"), (ZEROPP, "quantizer runs on a GPU only", "zero3")],
)
def test_features_without_a_forecast_are_refused_with_what_to_take(config, message, instead):
    with pytest.raises(UserError, match=message) as refused:
        simulated(config, 1.0)
    assert instead in refused.value.problems[0].hint
