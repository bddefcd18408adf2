"""Real programs load the checkpoints that `zerofit ckpt convert` wrote for them, and train on.

    python -m benchmarks.foreign_reader FOLDER RANKS

Each FOLDER/NAME has `saved` (the converted checkpoint) and `case.json` (a case of foreign_writer, how it is loaded).
The losses of the next steps go to FOLDER/NAME/next.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.foreign_writer import (
    AFTER,
    CASES,
    Case,
    adamw,
    batch,
    ds_config,
    make_model,
    parameter_groups,
    plain_step,
    start_engine,
    start_ranks,
    steps,
)


def load(folder: Path) -> list[float]:
    """Load a converted checkpoint into a program with other weights; return the losses of the next steps."""
    how = json.loads((folder / "case.json").read_text())
    case = replace(CASES[how["case"]], **how["change"])
    if how["program"] == "fsdp":
        return load_with_fsdp(case, folder)
    model = other_weights(make_model(case))
    groups = parameter_groups(model, case.groups)
    config = ds_config(case) | ({"checkpoint": {"load_universal": True}} if how["program"] == "universal" else {})
    engine = start_engine(model, config, groups)
    path, _ = engine.load_checkpoint(str(folder / "saved"))
    assert path is not None
    if how["program"] == "universal" and case.stage == 3:
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()  # its loader gives all groups one tensor

    def step() -> torch.Tensor:
        loss = engine(**batch()).loss
        engine.backward(loss)
        engine.step()
        return loss

    losses = steps(step, AFTER)
    engine.destroy()
    return losses


def load_with_fsdp(case: Case, folder: Path) -> list[float]:
    """Load with FSDP2 and torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
    from torch.distributed.fsdp import fully_shard

    model: Any = other_weights(make_model(case))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model, case)
    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states}
    load_distributed(saved, checkpoint_id=str(folder / "saved"))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return steps(plain_step(model, optimizer), AFTER)


def other_weights(model: Any) -> Any:
    """Change the weights, so that only a checkpoint that is loaded gives the right losses."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def load_all(folder: Path) -> None:
    """Load every folder as one rank."""
    for place in sorted(folder.iterdir()):
        if not (place / "case.json").is_file() or (place / "next.json").is_file():
            continue
        try:
            losses = load(place)
        except (Exception, CheckpointException):  # the latter is only a BaseException
            (place / f"error-{dist.get_rank()}.txt").write_text(traceback.format_exc())
        else:
            if dist.get_rank() == 0:
                (place / "next.json").write_text(json.dumps(losses))
        dist.barrier()


if __name__ == "__main__":
    start_ranks(int(sys.argv[2]), load_all, Path(sys.argv[1]))
