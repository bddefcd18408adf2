"""States of 8 bits, of SGD and of Adafactor: simulated as counted by hand, and forecast by plan as simulated."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest

from tests.simulate.targets import target
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.costs.profile import TraceSetting, profile_model
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.spec.devices import find_device
from zerofit.spec.overhead import blas_workspace_bytes

H100, SEQ_LEN = "h100-80gb", 64
WIDTH, INNER, LAYERS, WORDS = 512, 1280, 2, 2048
SHAPE = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": SEQ_LEN}
MATRICES = [(WORDS, WIDTH)] * 2 + [(WIDTH, WIDTH)] * 4 * LAYERS + [(WIDTH, INNER)] * 3 * LAYERS
VECTORS = [WIDTH] * (2 * LAYERS + 1)
ONE_GROUP = {"optimizer": "sgd", "weight_decay": 0.0}
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"config": f"zero{stage}", "optimizer": "adamw8bit"} for stage in (0, 2, 3)},
    "paged zero0": {"config": "zero0", "optimizer": "paged-adamw8bit"},
    "paged zero3": {"config": "zero3", "optimizer": "paged-adamw8bit"},
    "adafactor bf16": {"config": "zero0", "optimizer": "adafactor"},
    "adafactor fp32": {"config": "zero0", "optimizer": "adafactor", "precision": "fp32"},
    **{f"sgd zero{stage}": {"config": f"zero{stage}", "optimizer": "sgd"} for stage in (0, 2, 3)},
    "sgd fp32": {"config": "zero0", "optimizer": "sgd", "precision": "fp32"},
    "cpu sgd": {"config": "zero0", "optimizer": "sgd", "kind": "cpu"},
    "cpu zero0": {"config": "zero0", "optimizer": "adamw8bit", "kind": "cpu"},
    "cpu zero2": {"config": "zero2", "optimizer": "adamw8bit", "kind": "cpu", "precision": "fp32"},
    "cpu adafactor": {"config": "zero0", "optimizer": "adafactor", "kind": "cpu"},
    **{
        f"{kind} sgd zero{stage} one group": {"config": f"zero{stage}", **ONE_GROUP, "kind": kind}
        for kind in ("cpu", H100)
        for stage in (1, 2, 3)
    },
}


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    pytest.importorskip("bitsandbytes")
    usual = {"model": "llama-tiny", "model_args": SHAPE, "seq_len": SEQ_LEN, "kind": H100, "precision": "bf16"}
    targets = [target(**{**usual, **case}) for case in CASES.values()]
    return {
        name: (one, record)
        for name, one, record in zip(CASES, targets, simulate_all(targets, lambda text: None), strict=True)
    }


def eight_bit(numel: int) -> int:
    """A byte of each moment of a number, and a float32 for each 256 of them; small tensors stay in float32."""
    return 8 * numel if numel < 4096 else 2 * numel + 2 * 4 * -(-numel // 256)


def counted(name: str) -> int:
    matrices, vectors = [rows * columns for rows, columns in MATRICES], sum(VECTORS)
    if "adafactor" in name:
        return 4 * (sum(rows + columns for rows, columns in MATRICES) + vectors)
    if "sgd" in name:
        share = 1 if name in ("sgd zero0", "sgd fp32", "cpu sgd") else 2
        return 4 * (sum(matrices) + vectors) // share
    if "zero0" in name:
        paged = 2 * sum(matrices) if "paged" in name else 0
        return sum(map(eight_bit, matrices + VECTORS)) - paged + 2048
    flat = [sum(matrices) // 2, vectors // 2]
    return sum(map(eight_bit, flat)) - (2 * flat[0] if "paged" in name else 0) + 2048


@pytest.mark.parametrize("name", CASES)
def test_states_take_what_is_counted_by_hand(records, name):
    _, record = records[name]
    assert record.peaks[0].breakdown["optimizer state"] == pytest.approx(counted(name), abs=1024)


@cache
def profile(device: str, precision: str) -> Any:
    inputs = TextInputs(vocab_size=WORDS, seq_len=SEQ_LEN)
    return profile_model(find("llama-tiny"), "causal-lm", inputs, SHAPE, [TraceSetting(precision)], device)


def test_plan_forecasts_what_is_simulated(records):
    errors = {}
    for name, (one, record) in records.items():
        workspace = 0 if one.accelerator == "cpu" else blas_workspace_bytes(find_device(H100))
        forecaster = Forecaster(profile(one.accelerator, one.job.precision), one.accelerator, workspace)
        planned = forecaster.memory(PlannedLayout.of(one.job))
        errors[name] = planned.peak_bytes / record.peaks[0].bytes - 1
    sizes = [abs(error) for error in errors.values()]
    assert statistics.median(sizes) <= 0.01, errors
    assert max(sizes) <= 0.04, errors
    assert max(abs(error) for name, error in errors.items() if "one group" in name) <= 0.0001, errors


def test_paged_moments_are_on_the_host(records):
    parameters = sum(rows * columns for rows, columns in MATRICES)
    on_host = [records[name][1].host_phases["step"] for name in ("paged zero0", "zero0")]
    assert on_host[0] - on_host[1] == 2 * parameters
