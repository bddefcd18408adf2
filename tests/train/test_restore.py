"""Going on from a checkpoint is the uninterrupted run bit for bit: losses, weights, optimizer and random states."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.ranks.pool import Trained
from tests.train.small import LLAMA_SIZES
from zerofit.checkpoint import safe_load
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.errors import UserError

STEPS, AT = 8, 5
TEXT = {"data": "synthetic:64", "seq_len": 16, "micro_batch": 2, "steps": STEPS}
LLAMA = {"model": "llama-tiny", "model_args": {**LLAMA_SIZES, "vocab_size": 64}, **TEXT}
# dropout draws from each rank's random state
GPT2 = {
    "model": "gpt2",
    "model_args": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "resid_pdrop": 0.2},
    **TEXT,
}
# on four ranks, with heads for two dimensions
WIDE = {**LLAMA, "model_args": {**LLAMA["model_args"], "num_attention_heads": 4}, "ranks": 4}
MIXTRAL = {**LLAMA, "model": "mixtral-tiny"}
IMAGES = {"data": "digits", "steps": STEPS}
NARROW = {"model": "resnet18-small", "model_args": {"width": 8}}
CASES: dict[str, dict[str, Any]] = {
    "stage 0, bf16": {**LLAMA, "ds_config": "zero0", "precision": "bf16"},
    "stage 1, accumulation": {**GPT2, "ds_config": "zero1", "gradient_accumulation_steps": 3},
    "stage 3, bf16": {**GPT2, "ds_config": "zero3", "precision": "bf16"},
    "stage 3, offload": {**LLAMA, "ds_config": "zero3_offload"},
    "pipeline": {**GPT2, "pipeline": 2, "gradient_accumulation_steps": 2},
    "DualPipeV": {**GPT2, "pipeline": 2, "pipeline_schedule": "dualpipev", "precision": "bf16"},
    "tensor parallel": {**LLAMA, "tensor_parallel": 2},
    "sequence parallel": {**LLAMA, "sequence_parallel": 2},
    "PP2 x TP2, bf16": {**WIDE, "pipeline": 2, "tensor_parallel": 2, "precision": "bf16"},
    "PP2 x SP2, stage 0": {**WIDE, "pipeline": 2, "sequence_parallel": 2, "ds_config": "zero0"},
    "TP2 x SP2, stage 3": {**WIDE, "tensor_parallel": 2, "sequence_parallel": 2, "ds_config": "zero3"},
    "spread experts, stage 2": {**MIXTRAL, "expert_parallel": 2, "ds_config": "zero2"},
    "spread experts, SP2, stage 3": {**MIXTRAL, "expert_parallel": 2, "sequence_parallel": 2, "ds_config": "zero3"},
    "PP2 x EP2, bf16": {**MIXTRAL, "ranks": 4, "pipeline": 2, "expert_parallel": 2, "precision": "bf16"},
    "muon": {**LLAMA, "model_args": {**LLAMA["model_args"], "intermediate_size": 32}, "optimizer": "muon"},
    "batch norm": {**IMAGES, **NARROW, "micro_batch": 2, "eval_every": 3, "eval_samples": 4},
    "gan": {**IMAGES, "model": "dcgan", "micro_batch": 2, "eval_samples": 4},
    "in the second epoch": {**IMAGES, "model": "mlp", "micro_batch": 200, "ds_config": "zero3"},
}


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit(pools, tmp_path, case):
    options = {"ranks": 2, **CASES[case]}
    pool = pools(options.pop("ranks"))
    whole = pool.train(tmp_path / "whole", save_every=AT, **options)
    resumed = pool.train(
        tmp_path / "resumed", save_every=STEPS, resume=str(tmp_path / "whole/checkpoints/step-00000005"), **options
    )
    assert resumed.job.start.same_layout
    assert resumed.result["resumed_from"].endswith("step-00000005")
    assert numbers(resumed) == numbers(whole)[AT:]
    entries = state(whole, STEPS)
    assert len(entries) > 10
    other = state(resumed, STEPS)
    assert [name for name in entries if not same(entries[name], other[name])] == []


def test_a_stream_goes_on_bit_for_bit(pools, tmp_path, cache):
    (tmp_path / "set").mkdir()
    lines = [json.dumps({"text": f"text {n} of a stream, " * 60}) for n in range(1500)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(lines))
    args = {**LLAMA_SIZES, "vocab_size": 260}
    options = {**LLAMA, "model_args": args, "data": f"hf:{tmp_path}/set", "stream": True, "seq_len": 256}
    pool, run = pools(2), {"eval_samples": 8, "save_every": AT}
    whole = pool.train(tmp_path / "whole", **run, **options)
    for file in cache.glob("streams/*/block-*"):
        file.unlink()
    checkpoint = str(tmp_path / "whole/checkpoints/step-00000005")
    resumed = pool.train(tmp_path / "resumed", **run, **options, resume=checkpoint)
    assert numbers(resumed) == numbers(whole)[AT:]
    with pytest.raises(UserError, match="a stream without an end"):
        pool.train(tmp_path / "endless", **{**options, "steps": None})


def test_clipping_is_that_of_the_new_start(pools, tmp_path):
    """DeepSpeed would clip with the checkpoint's limit. The update of SGD is the clipped gradient times 0.5."""
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = {**IMAGES, "model": "mlp", "micro_batch": 8, "ds_config": str(tmp_path / "ds.json")}
    first = pools(2).train(tmp_path / "first", **{**run, "steps": AT}, save_every=AT, gradient_clipping=1.0)
    checkpoint, limit = str(first.folder.checkpoints / f"step-{AT:08}"), 1e-6
    resumed = pools(2).train(tmp_path / "resumed", **run, save_every=STEPS, gradient_clipping=limit, resume=checkpoint)
    assert min(step["grad_norm"] for step in resumed.steps) > 100 * limit
    before = FullState(first.folder.checkpoints / f"step-{AT:08}")
    after = FullState(resumed.folder.checkpoints / f"step-{STEPS:08}")
    moved = [(after.read(name) - before.read(name)).norm() for name in before.tensors]
    assert torch.stack(moved).norm() <= 1.01 * (STEPS - AT) * 0.5 * limit


def numbers(run: Trained) -> list[tuple]:
    return [tuple(step[key] for key in ("step", "samples", "loss", "lr", "grad_norm")) for step in run.steps]


def state(run: Trained, step: int) -> dict[str, Any]:
    """Every value in every file of a checkpoint, by its path."""
    folder = run.folder.checkpoints / f"step-{step:08}"
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.pt")):
        flatten(safe_load.load(file), file.relative_to(folder).as_posix(), found)
    return found


def flatten(value: Any, path: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            flatten(part, f"{path}/{key}", found)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            flatten(part, f"{path}/{number}", found)
    elif isinstance(value, torch.Tensor | int | float | str | bool | type(None)) and "/ds_config/" not in path:
        found[path] = value


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
