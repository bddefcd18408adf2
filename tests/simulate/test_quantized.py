"""Weights in 4 bits at ZeRO stage 3, with their scales quantized, too: forecast by plan as simulated."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.meter.planned import planned
from tests.simulate.targets import target
from tests.simulate.test_optimizers import H100, SEQ_LEN, SHAPE
from zerofit.simulate.forecast.processes import simulate_all

BITS = {"config": "zero3", "lora": 8, "quantize": "nf4", "double_quant": True, "precision": "bf16", "kind": H100}
CASES: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 2, "micro_batch": 8, "gpus": 8},
    {"activation_checkpointing": True, "micro_batch": 8, "gpus": 8},
]


def test_plan_forecasts_what_is_simulated():
    pytest.importorskip("bitsandbytes")
    targets = [target(model="llama-tiny", model_args=SHAPE, seq_len=SEQ_LEN, **{**BITS, **case}) for case in CASES]
    for one, record in zip(targets, simulate_all(targets, lambda text: None), strict=True):
        assert planned(one).peak_bytes == pytest.approx(record.peaks[0].bytes, rel=0.04)
