"""Large models on many ranks: extended from few layers of each kind, and without a fake for each rank's piece."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import JambaConfig

from tests.simulate.targets import PARAMETERS, TINY, target
from zerofit.simulate.forecast import run
from zerofit.simulate.forecast.run import SimulatedRank, layer_counts, simulate_ranks

DENSE, LAYERS = 1, 9  # of them have no experts, in all
SMALL_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": DENSE,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}


def deepseek(stage: int) -> Any:
    flags = {"model": "deepseek-v3", "model_args": SMALL_DEEPSEEK, "seq_len": 32, "expert_parallel": 4}
    return target(f"zero{stage}", gpus=8, kind="h100-80gb", precision="bf16", **flags)


def test_ranks_that_divide_flat_groups_are_not_extended(monkeypatch):
    """With fewer layers a rank's partition would hold other parameters."""
    monkeypatch.setattr(run, "WORTH", 3)
    assert run.layer_counts(deepseek(2)) is None
    assert run.layer_counts(deepseek(3))


@pytest.mark.slow
def test_layers_without_experts_are_not_extended(monkeypatch):
    """A DeepSeek-V3 of 1 and 8 layers, against all of them: every kind, phase and place."""
    monkeypatch.setattr(run, "WORTH", 3)  # else so few layers would all be simulated
    (few,), (exact,) = (simulate_ranks([deepseek(3)], lambda text: None, exact=all_) for all_ in (False, True))
    assert isinstance(few, SimulatedRank) and isinstance(exact, SimulatedRank)
    assert few.layers and min(few.layers) > DENSE and max(few.layers) < LAYERS
    for one, other in zip(few.record.phases, exact.record.phases, strict=True):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.005), one.name
        assert one.end_bytes == pytest.approx(other.end_bytes, rel=0.005), one.name
    assert few.record.peaks[0].key == exact.record.peaks[0].key
    for kind, size in exact.record.peaks[0].breakdown.items():
        assert few.record.peaks[0].breakdown[kind] == pytest.approx(size, rel=0.005), kind
    assert few.record.host == pytest.approx(exact.record.host, rel=0.005)
    assert few.record.kept == pytest.approx(exact.record.kept, rel=0.005)


def test_layers_of_which_one_is_trained_are_not_extended(monkeypatch):
    """Of the last block 2 bytes per parameter, and 12 of its weights and states in fp32; of the others 2."""
    monkeypatch.setattr(run, "WORTH", 3)
    args = {**TINY, "num_hidden_layers": LAYERS}
    asked = target("zero1", gpus=1, precision="bf16", model_args=args, train=[f"model.layers.{LAYERS - 1}.*"])
    (found,) = simulate_ranks([asked], lambda text: None)
    assert isinstance(found, SimulatedRank) and not found.layers
    block = 4 * 32 * 32 + 3 * 32 * 80 + 2 * 32
    assert found.record.peaks[0].breakdown["optimizer state"] == pytest.approx(8 * block, abs=1024)


def test_layers_of_several_kinds_are_not_extended(tmp_path, monkeypatch):
    """Every eighth layer of a Jamba has attention, the others a Mamba: few of them do not say what all have."""
    monkeypatch.setattr(run, "WORTH", 3)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    kinds: dict[str, Any] = {"num_experts": 1, "num_hidden_layers": LAYERS, "vocab_size": 64, "mamba_dt_rank": 4}
    JambaConfig(architectures=["JambaForCausalLM"], **sizes, **kinds).save_pretrained(tmp_path)
    assert layer_counts(target(model=str(tmp_path), seq_len=16, gpus=1)) is None
    assert layer_counts(target(model_args={**TINY, "num_hidden_layers": LAYERS}, gpus=1)) is not None


@pytest.mark.parametrize(
    ("case", "linear"),
    [
        # the gradients of some more layers lie in one bucket of an all-reduce, those of all do not
        ({"config": "zero0", "model": "gemma-2-2b", "seq_len": 1024}, {"gpus": 1}),
        # the device holds the parameters and a flat copy of them for few layers, not for all: put together on the host
        (
            {"config": "zero1", "model": "llama-3.1-8b", "kind": "l4", "gpus": 1, "precision": "bf16", "seq_len": 128},
            {"kind": "h100-80gb"},
        ),
    ],
)
def test_what_changes_with_more_layers_is_not_extended(case, linear):
    case = {"kind": "h100-80gb", **case}
    assert layer_counts(target(**case)) is None
    assert layer_counts(target(**case | linear)) is not None


def test_a_flat_copy_that_the_device_cannot_hold_is_made_on_the_host():
    one = target("zero1", gpus=1, kind="l4", precision="bf16")
    few = replace(one, device_bytes=3 * PARAMETERS)  # less than the bf16 parameters and their copy
    ranks = simulate_ranks([few, one], lambda text: None)
    host = [rank.record.host_phases["init"] for rank in ranks if isinstance(rank, SimulatedRank)]
    assert host[0] == pytest.approx(2 * 2 * PARAMETERS, rel=0.01)  # the parameters, and their copy
    assert host[1] < 1000


@pytest.mark.parametrize(
    ("layers", "sub_group", "zero"),
    [
        # the last sub-group has least of the states to make, and with the simulated layers more and more
        (18, 34_000, {}),
        # host memory: a gradient for each sub-group, the last one smaller; torch locks powers of two
        (13, 17_000, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
    ],
)
@pytest.mark.slow
def test_sub_groups_are_no_line(layers, sub_group, zero, monkeypatch):
    """Two ranks have 5,888 elements each of a layer's matrices: sub-groups of six layers, or of three, as they fall."""
    monkeypatch.setattr(run, "WORTH", 3)
    zero |= {"stage": 3, "sub_group_size": sub_group, "reduce_bucket_size": 12_000}
    zero |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 12_000)  # few, so that all else
    zero |= dict.fromkeys(
        ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), 100
    )  # is less than states
    args = {"model": "llama-tiny", "model_args": {**TINY, "num_hidden_layers": layers}, "micro_batch": 1, "seq_len": 4}
    one = target({"zero_optimization": zero}, kind="h100-80gb", precision="bf16", **args)
    (few,), (exact,) = (simulate_ranks([one], lambda text: None, exact=all_) for all_ in (False, True))
    assert isinstance(few, SimulatedRank) and isinstance(exact, SimulatedRank)
    assert few.layers
    assert few.record.peaks[0].key == exact.record.peaks[0].key
    assert few.record.peaks[0].breakdown == pytest.approx(exact.record.peaks[0].breakdown, rel=0.005, abs=64)
    assert few.record.host == pytest.approx(exact.record.host, rel=0.005)
    assert (few.record.host["pinned"] > 0) == ("offload_optimizer" in zero)


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.slow
def test_the_highest_place_of_a_kind_changes_with_the_layers(micro_batch, monkeypatch):
    """A gradient is cast at the start of backward, and at its end, where the embedding is whole.

    The end is the higher one with few layers; with all the start is, where the inputs of enough of them are kept.
    """
    monkeypatch.setattr(run, "WORTH", 3)
    host = {"device": "cpu"}
    zero = {"stage": 3, "overlap_comm": True, "offload_optimizer": host, "offload_param": host}
    zero |= dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), 2_000)
    zero |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 100)
    zero |= {"stage3_param_persistence_threshold": 100}
    shape = {**TINY, "num_hidden_layers": 26, "vocab_size": 2048}
    more = {"model_args": shape, "micro_batch": micro_batch, "seq_len": 64, "activation_checkpointing": True}
    one = target({"zero_optimization": zero}, kind="h100-80gb", precision="bf16", model="llama-tiny", **more)
    (few,), (exact,) = (simulate_ranks([one], lambda text: None, exact=all_) for all_ in (False, True))
    assert isinstance(few, SimulatedRank) and isinstance(exact, SimulatedRank)
    assert few.layers
    casts = {peak.key: peak for peak in exact.record.peaks if "_to_copy|deepspeed/runtime/zero/stage3" in peak.key}
    known = {peak.key: peak.bytes for peak in few.record.peaks if peak.key in casts}
    assert known == {key: pytest.approx(peak.bytes, abs=64) for key, peak in casts.items()}
    kept = [peak.breakdown.get("activations", 0) for peak in casts.values() if peak.step == 1]
    assert all(size > 26 * micro_batch * 64 * 32 * 2 for size in kept) == (micro_batch == 2)


@pytest.mark.parametrize(
    ("unused", "expected"),
    [
        ((100, 100, 2100), 2100),  # one segment more with the most layers: it stays
        ((100, 2100, 2100), 2100),
        ((100, 120, 140), 140 + 10 * 20),  # each layer leaves as much
        ((140, 120, 140), 140),
    ],
)
def test_what_is_reserved_grows_as_it_does_over_both_stretches(unused, expected):
    """3, 5 and 7 layers, which need 1000 bytes each, extended to 27: unused bytes beside their peaks."""
    counts = (3, 5, 7)
    records: Any = [
        SimpleNamespace(reserved_bytes=1000 * n + more, peaks=[SimpleNamespace(bytes=1000 * n)])
        for n, more in zip(counts, unused, strict=True)
    ]
    assert run._reserved(records, counts, 27, 27_000, "reserved_bytes") == 27_000 + expected
