"""vLLM's memory against what it printed, and its cache against hand-computed blocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zerofit.app.planning.serving import serve, served_model
from zerofit.models.catalog import find, source_config
from zerofit.rollout.cache import CacheLayers, Need, plan_cache
from zerofit.rollout.served import BITS, published_format, unquantized_modules
from zerofit.rollout.vllm import EngineMemory, EngineSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.device_file import GIB
from zerofit.spec.errors import UserError


def engine(model: str, gpu: str = "h100-80gb", **settings) -> EngineMemory:
    served, device = served_model(model, {}), Cluster(gpu).device
    return EngineMemory(model=served, device=device, settings=EngineSettings(**settings).settled(served, device))


# llm-d-incubation/llm-d-planner, accuracy/accuracy_report.md: vLLM 0.19.0 on an H100 of 79.19 GiB, utilization 0.95
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


# public start-up logs with two GPUs over NVLink (benchmarks/serving_logs.json), and of V1 while it was experimental
V100 = {"dtype": "fp16", "max_model_len": 40000, "max_num_batched_tokens": 40000, "tensor_parallel_size": 2}
H100 = {"quantization": "fp8", "tensor_parallel_size": 2, "max_model_len": 16000}
EARLY = {"v1": True, "quantization": "w8a8", "gpu_memory_utilization": 0.98, "max_model_len": 2048}
LOGS = {
    "an H100 pair": (
        "llama-3.1-70b",
        "h100-80gb",
        79.18,
        (0, 11),
        {"quantization": "fp8", "tensor_parallel_size": 2},
        32.0,
    ),
    "a V100 pair": ("llama-3.1-8b", "v100-16gb", 15.77, (0, 6), V100, 3.76),
    "early V1": ("llama-3.1-70b", "h100-80gb", 79.11, (0, 7), EARLY, 6.74),
}


@pytest.mark.parametrize("log", LOGS)
def test_the_cache_is_what_vllm_printed(log):
    model, gpu, total, release, settings, printed = LOGS[log]
    served, device = served_model(model, {}), replace(Cluster(gpu).device, memory_bytes=round(total * GIB))
    settled = EngineSettings(release=release, **settings).settled(served, device)
    found = EngineMemory(model=served, device=device, settings=settled)
    assert found.cache_bytes / GIB == pytest.approx(printed, rel=0.08)


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
    values |= {"enforce_eager": "no", "v1": "False"}  # any text is true in Python
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


def test_published_weights_keep_their_format(tmp_path):
    """vLLM 0.19 printed for gpt-oss-20b on an A100, of which it may use 65 %: 13.72 GiB, then 36.56 GiB of KV cache."""
    found = engine("gpt-oss-20b", "a100-80gb", gpu_memory_utilization=0.65, release=(0, 19))
    assert found.weights / GIB == pytest.approx(13.72, rel=0.005)
    assert found.cache_bytes / GIB == pytest.approx(36.56, rel=0.01)
    assert engine("gpt-oss-120b", release=(0, 10)).weights / GIB == pytest.approx(65.97, rel=0.005)  # both on an H100
    assert engine("gpt-oss-120b", release=(0, 14)).weights / GIB == pytest.approx(64.38, rel=0.005)
    full = engine("deepseek-v3", "h200", tensor_parallel_size=8, quantization="none").weights
    table = 2 * 129280 * 7168  # embedding and head stay in 16 bits
    part = (engine("deepseek-v3", "h200", tensor_parallel_size=8).weights - full) / (671026404352 - table)
    assert part == pytest.approx(-1 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("written", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "w4a16"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        ({}, None),
        (None, None),
        ("awq", "awq"),
        ({"quant_method": "gptq", "bits": [4]}, "gptq of [4] bits"),
        ({"quant_method": "compressed-tensors", "config_groups": None}, "compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
    ],
)
def test_formats_of_configs(written, bits):
    assert published_format(written) == bits


ATTENTION = 2 * 2048 * 2048 + 2 * 2048 * 512  # parameters of a layer of llama-3.2-1b: 32 heads, 8 of keys and values


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                "ignore": ["lm_head", "re:.*self_attn.*"],
            },
            16 * ATTENTION,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "ignore": ["lm_head", "model.layers.1.self_attn*", "model.layers.10.self_attn*"],
            },
            2 * ATTENTION,
        ),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, 16 * ATTENTION),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.self_attn.q_proj"]}, 2048 * 2048),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}, 0),
        ({"quant_method": "fp8"}, 0),
    ],
)
def test_modules_that_a_config_leaves_out_keep_16_bits(tmp_path, written, kept):
    values = source_config(find("llama-3.2-1b")) | {"quantization_config": written}
    (tmp_path / "config.json").write_text(json.dumps(values))
    served = served_model(str(tmp_path / "config.json"), {})
    table, bits = 128256 * 2048, BITS[published_format(written) or ""]
    weights = served.weight_bytes(2, 1, served.published) - served.rope_bytes
    assert weights == pytest.approx((served.parameters - table - kept) * bits + 2 * (table + kept), rel=1e-6)


def test_weights_of_unknown_bytes_are_refused_unless_a_format_is_named(tmp_path):
    values = source_config(find("llama-3.2-1b")) | {"quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="quantized with aqlm"):
        serve(str(tmp_path / "config.json"), Cluster("l4"), {}, {})
    assert serve(str(tmp_path / "config.json"), Cluster("l4"), {}, {"quantization": "gptq"}).engine.fits


# published: parameters that a token uses, and layers with a KV cache and with a state (model cards; Jamba's paper)
SHAPES = {
    "nemotron-3-nano-30b-a3b": (3.5e9, 6, 23),
    "jamba-v0.1": (12e9, 4, 28),
    "deepseek-v3": (37e9, 61, 0),
    "qwen3-next-80b-a3b": (3.9e9, 12, 36),
    "lfm2-1.2b": (1.17e9, 6, 10),
    "nemotron-h-8b": (8.1e9, 4, 24),
    "qwen2.5-vl-7b": (8.3e9, 28, 0),
}


@pytest.mark.parametrize("model", SHAPES)
def test_shapes_of_mixed_models_are_the_published_ones(model):
    used, cached, states = SHAPES[model]
    served = served_model(model, {})
    assert served.active_parameters == pytest.approx(used, rel=0.03)
    kinds = {kind == "state": count for count, kind, _ in served.kinds}
    assert (kinds.get(False, 0), kinds.get(True, 0)) == (cached, states)
    assert engine(model, "h200", max_model_len=4096, tensor_parallel_size=8).fits


def test_an_encoder_is_no_model_that_generates():
    with pytest.raises(UserError, match="bert-base is not a decoder"):
        served_model("bert-base", {})


def test_a_pattern_that_cannot_be_read_is_refused():
    with pytest.raises(UserError, match=r"the pattern 're:\[' is no regular expression"):
        unquantized_modules({"ignore": ["lm_head", "re:["]})
