"""vLLM's memory against what it printed, and its cache against hand-computed blocks."""

from __future__ import annotations

import pytest

from zerofit.app.planning.serving import served_model
from zerofit.rollout.cache import CacheLayers, Need, plan_cache
from zerofit.rollout.vllm import EngineMemory, EngineSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.device import GIB
from zerofit.spec.errors import UserError


def engine(model: str, gpu: str = "h100-80gb", **settings) -> EngineMemory:
    served, device = served_model(model, {}), Cluster(gpu).device
    return EngineMemory(model=served, device=device, settings=EngineSettings(**settings).settled(served, device))


# llm-d-incubation/llm-d-planner, accuracy/accuracy_report.md: vLLM 0.19.0 on an H100 of 79.19 GiB, utilisation 0.95
MEASURED = {
    "llama-3.1-8b": (14.99, 1.89, 476_000),
    "qwen2.5-7b": (14.25, 2.21, 1_096_000),
    "codellama-7b": (12.56, 0.77, None),
    "granite-3.1-8b": (15.25, 0.85, None),
    "phi-4": (27.31, 1.52, None),
}


@pytest.mark.parametrize("model", MEASURED)
def test_memory_is_what_vllm_printed(model):
    weights, activations, tokens = MEASURED[model]
    found = engine(model, gpu_memory_utilization=0.95, max_model_len=8192, release=(0, 19))
    assert found.weights / GIB == pytest.approx(weights, rel=0.01)
    assert found.activations / GIB == pytest.approx(activations, rel=0.03)
    if tokens:
        assert found.cache.tokens(found.blocks, found.need) == pytest.approx(tokens, rel=0.005)


def test_a_hybrid_model_is_divided_as_vllm_divides_it():
    """vLLM 0.22 printed for Qwen3.5-4B: blocks of 528 tokens, 11.11 GiB, 137.80 sequences of 1,024 tokens."""
    cache = engine("qwen3.5-4b", max_model_len=1024, max_num_batched_tokens=8192).cache
    assert cache.block_tokens == 528
    assert cache.sequences(cache.blocks(11.11 * GIB), Need(1024, 8192)) == pytest.approx(137.80, abs=0.2)


def test_windows_share_blocks_with_full_attention():
    # 5 layers of a window to 1 of full attention, as Gemma 3: groups of 1 layer, 16 tokens of 4,096 bytes each
    kinds = [CacheLayers(count=5, token_bytes=4096, window=1024), CacheLayers(count=1, token_bytes=4096)]
    cache = plan_cache(kinds)
    assert (cache.group_layers, cache.block_bytes) == (1, 16 * 4096)
    window = -(-(1023 + 2048) // 16) + 1  # of each of 5 groups
    assert cache.blocks_of_request(Need(8192, 2048)) == 8192 // 16 + 5 * window
    assert plan_cache(kinds, hybrid=False).blocks_of_request(Need(8192, 2048)) == 8192 // 16  # of 6 layers


def test_latent_attention_is_on_every_rank():
    one, two = (engine("deepseek-v2-lite", tensor_parallel_size=n, max_model_len=4096) for n in (1, 2))
    assert one.cache.block_bytes == two.cache.block_bytes == 27 * 16 * (512 + 64) * 2


def test_the_inverse_is_the_edge():
    found = engine("qwen3-8b", "l4", max_model_len=8192)
    low, high = found.smallest_utilization, found.largest_utilization
    for share, fits in ((low, True), (low - 0.01, False), (high, True), (high + 0.01, False)):
        assert engine("qwen3-8b", "l4", max_model_len=8192, gpu_memory_utilization=share).fits is fits
    assert engine("qwen3-8b", "l4", max_model_len=found.longest).fits
    assert not engine("qwen3-8b", "l4", max_model_len=found.longest + 16).fits


def test_all_bad_settings_are_reported_at_once():
    values = {"gpu_memory_utilization": 2, "max_model_len": 0, "quantization": "q4", "release": "new", "foo": 1}
    with pytest.raises(UserError) as caught:
        EngineSettings.read(values, "--rollout")
    assert len(caught.value.problems) == len(values)


def test_a_config_without_a_limit_has_vllms_default_length():
    """XLNet writes -1 for no limit; vLLM's default is then 2048 tokens (config/model.py)."""
    served, device = served_model("llama-3.2-1b", {"max_position_embeddings": -1}), Cluster("l4").device
    found = EngineMemory(model=served, device=device, settings=EngineSettings().settled(served, device))
    assert served.positions is None
    assert found.settings.max_model_len == 2048
    assert found.sequences > 1
