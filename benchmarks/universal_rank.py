"""One rank of a plain DeepSpeed engine that loads universal checkpoints (see export_matrix.py)."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from zerofit.train.process_group import start

BATCH = torch.arange(4 * 16).view(4, 16) % 250
STAGES = (1, 2, 3)


def main() -> None:
    """Every source at every stage; rank 0 writes the rows."""
    start(timedelta(minutes=5))
    out, *sources = sys.argv[1:]
    named = [(layout, folder) for layout, _, folder in (source.partition("=") for source in sources)]
    rows = [load(layout, folder, stage) for layout, folder in named for stage in STAGES]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def load(layout: str, folder: str, stage: int) -> dict[str, Any]:
    """Load one universal checkpoint, look at every state, train two steps."""
    ranks = dist.get_world_size()
    engine = make(folder, stage, ranks)
    engine.load_checkpoint(f"{folder}/universal")
    first, same = engine.global_steps, all_same(engine, Path(folder) / "universal")
    inner = engine.optimizer.optimizer
    for group in inner.param_groups:
        group["lr"], group["weight_decay"] = 1e-2, 0.0  # the run's own has come down to 0
    for state in inner.state.values():
        state["step"] = state["step"].clone()  # stage 3's loader gives all groups one tensor, which then counts twice
    mine, losses = BATCH.chunk(ranks)[dist.get_rank()], []
    for _ in range(2):
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append((total / ranks).item())
    engine.destroy()
    said = {"source": layout, "stage": stage, "ranks": ranks, "first_step": first}
    return said | {"states_bit_for_bit": same, "losses": losses}


def make(folder: str, stage: int, ranks: int) -> Any:
    """An engine as its documentation has it, with other weights than the checkpoint's."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(f"{folder}/out")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    ds_config = {
        "train_micro_batch_size_per_gpu": len(BATCH) // ranks,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)[0]


def all_same(engine: Any, universal: Path) -> bool:
    """Whether every master weight and moment in the engine is what the files hold."""
    tag, same = (universal / "latest_universal").read_text(), True
    for name, parameter in engine.module.named_parameters():
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            if kind == "fp32":
                found = safe_get_full_fp32_param(parameter)
            else:
                found = safe_get_full_optimizer_state(parameter, kind)
            wanted = torch.load(universal / tag / "zero" / name / f"{kind}.pt")["param"]
            same &= found is not None and torch.equal(found.cpu().view_as(wanted), wanted)
    return same


if __name__ == "__main__":
    main()
