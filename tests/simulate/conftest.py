"""Simulations that several tests look at run side by side, once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulate.targets import target

TARGETS: dict[str, dict[str, Any]] = {
    **{f"zero{s} fp32 x1": {"config": f"zero{s}", "gpus": 1} for s in range(4)},
    **{f"zero{s} bf16 x8": {"config": f"zero{s}", "gpus": 8, "precision": "bf16"} for s in range(4)},
    "zero2 first": {"config": "zero2", "gpus": 8},
    "zero3 first": {"config": "zero3", "gpus": 8},
    "zero2 last": {"config": "zero2", "gpus": 8, "rank": 7},
    "zero3 last": {"config": "zero3", "gpus": 8, "rank": 7},
    "pipeline first": {"config": "pipeline", "pipeline": 2, "gradient_accumulation_steps": 4},
    "pipeline last": {"config": "pipeline", "pipeline": 2, "gradient_accumulation_steps": 4, "rank": 1},
    "dualpipev first": {"config": "pipeline", "pipeline": 2, "pipeline_schedule": "dualpipev"},
    "dualpipev last": {"config": "pipeline", "kind": "l4", "rank": 1, "pipeline": 2, "pipeline_schedule": "dualpipev"},
    "tensor parallel": {"config": "tensor_parallel", "tensor_parallel": 2},
    "sequence parallel": {"config": "sequence_parallel", "sequence_parallel": 2},
    "pipeline and tensor": {"config": "pipeline", "gpus": 4, "pipeline": 2, "tensor_parallel": 2},
    "pipeline and tensor last": {"config": "pipeline", "gpus": 4, "rank": 2, "pipeline": 2, "tensor_parallel": 2},
    "tensor and sequence": {"config": "zero1", "gpus": 4, "tensor_parallel": 2, "sequence_parallel": 2},
    "gpu": {"config": "zero2", "kind": "h100-80gb", "precision": "bf16"},
    "gpu fp16": {"config": "zero0", "kind": "v100-16gb", "precision": "fp16"},
    "gpu offload": {"config": "zero2_offload", "kind": "h100-80gb", "precision": "bf16"},
    "gpu offload all": {"config": "zero3_offload", "kind": "h100-80gb", "precision": "bf16"},
    "gpu nvme": {"config": "zero3_nvme", "kind": "h200", "precision": "bf16", "model": "llama-tiny", "seq_len": 16},
    "checkpointing": {"config": "zero2", "activation_checkpointing": True},
    "cnn": {"config": "zero2", "model": "resnet18-small", "precision": "bf16"},
    "own": {"config": "zero2", "model": "tests.train.own_models:OwnLoss", "image": "image:1x8x8"},
    "asking": {"config": "zero2", "model": "tests.simulate.own:AsksForAValue"},
    "untraceable": {"config": "zero2", "model": "tests.simulate.own:looks_at_values"},
}  # fmt: skip


@pytest.fixture(scope="session")
def simulated(cache: Any) -> dict[str, Any]:
    """Name of a target -> its record, or the Problem that stopped it."""
    from zerofit.simulate.forecast.processes import simulate_all

    targets = [target(**spec) for spec in TARGETS.values()]
    return dict(zip(TARGETS, simulate_all(targets, lambda text: None), strict=True))
