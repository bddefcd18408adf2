"""Small runs in several layouts, each trained once a session when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ranks.pool import Trained
from zerofit.app.checkpoints import Checkpoint

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "vocab_size": 260, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260, "bos_token_id": 256, "eos_token_id": 256}
BERT = {**SHAPE, "vocab_size": 260}
VIT = {**SHAPE, "patch_size": 4}
TEXT = {"steps": 3, "micro_batch": 2, "seq_len": 16, "save_every": "2", "lr": 1e-2, "eval_samples": 8}
IMAGES = {"data": "digits", "steps": 2, "micro_batch": 2, "image_size": 8, "save_every": "1", "eval_samples": 8}

RUNS = {
    "zero2": {"model": "llama-tiny", "model_args": GROUPED, "ds_config": "zero2", **TEXT},
    "zero3-bf16": {"model": "llama-tiny", "model_args": GROUPED, "ds_config": "zero3", "precision": "bf16", **TEXT},
    "tp-tied": {"model": "qwen2.5-0.5b", "model_args": GROUPED, "tensor_parallel": 2, "ds_config": "zero1", **TEXT},
    "pp-tied": {"model": "gpt2", "model_args": GPT2, "pipeline": 2, **TEXT},
    "images": {
        "model": "resnet18-small",
        "model_args": {"width": 4},
        "optimizer": "adamw",
        "ds_config": "zero1",
        **IMAGES,
    },
}


@pytest.fixture(scope="session")
def runs(pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A run of RUNS on two ranks, by its name; its last checkpoint is of its last step."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text in which numbers go up to {i * i}\n" for i in range(60)))
    done: dict[str, Trained] = {}

    def run(name: str) -> Trained:
        if name not in done:
            done[name] = pools(2).train(folder / name, **{"data": f"text:{text}", **RUNS[name]})
        return done[name]

    return run


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> dict[int, Path]:
    """A checkpoint of two ranks for each stage, by zerofit's writer, whose files DeepSpeed loads."""
    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    for stage in (1, 2, 3):
        Checkpoint(folder / "state.pt").convert(folder / str(stage), to="deepspeed", ranks=2, stage=stage)
    return {stage: folder / str(stage) for stage in (1, 2, 3)}
