"""Configuration changes that make a checkpoint impossible to resume, as far as the two jobs tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.spec.errors import Problem
from zerofit.spec.optimizers import EIGHT_BIT, run_name
from zerofit.spec.run_folder import Job

Config = dict[str, Any]


@dataclass(frozen=True)
class Obstacle:
    """A setting of a DeepSpeed JSON that keeps state where no other layout, or no resumed run at all, finds it."""

    key: str  # in the DeepSpeed JSON
    applies: Callable[[Config], bool]
    why: str
    instead: str
    always: bool = False  # also where the layout stays as it is


def _zero(config: Config) -> Config:
    return config.get("zero_optimization", {})


def _offload(config: Config) -> Config:
    return _zero(config).get("offload_optimizer") or {}


def _kind(config: Config) -> str:
    return str(config.get("optimizer", {}).get("type", "")).lower()


OBSTACLES = (
    Obstacle(
        "zero_optimization.offload_optimizer.ratio",
        lambda c: _offload(c).get("ratio", 1.0) < 1,
        "the states of the part that stays on the device are in an optimizer that DeepSpeed does not save",
        "offload_optimizer.ratio 1.0",
        always=True,
    ),
    Obstacle(
        "zero_optimization.offload_optimizer.super_offload",
        lambda c: bool(_offload(c).get("super_offload")),
        "SuperOffload's optimizer states are in a process of their own, which DeepSpeed does not save",
        "zero3_offload",
        always=True,
    ),
    Obstacle(
        "zero_optimization.zenflow",
        lambda c: _zero(c).get("zenflow") is not None,
        "ZenFlow keeps the states of its selected columns, and gradients that wait, where DeepSpeed does not save them",
        "the same offload without zenflow",
        always=True,
    ),
    Obstacle(
        "optimizer.type",
        lambda c: _kind(c) in ("onebitadam", "zerooneadam", "onebitlamb"),
        "1-bit optimizers keep errors of their compression that belong to a rank",
        "AdamW",
    ),
    Obstacle(
        "optimizer.type",
        lambda c: run_name(_kind(c)) in EIGHT_BIT,
        "moments of 8 bits have scales of blocks, which another layout cuts elsewhere: they would be rounded anew",
        "the layout that wrote the checkpoint, or begin anew from the exported weights",
    ),
    Obstacle(
        "optimizer.type",
        lambda c: _kind(c) == "adafactor",
        "Adafactor's states are numbers of rows and columns, which are not carried over",
        "the layout that wrote the checkpoint, or begin anew from the exported weights",
    ),
    Obstacle(
        "data_efficiency",
        lambda c: bool(c.get("data_efficiency", {}).get("enabled")) or bool(c.get("curriculum_learning")),
        "the state of curriculum learning and random-LTD is not carried over",
        "the layout that wrote the checkpoint",
    ),
)


# What of the DeepSpeed JSON decides which tensors its files hold, and how they are cut.
STORAGE = ("zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "tensor_parallel")


def same_storage(old: Job, new: Job) -> bool:
    """Return whether DeepSpeed can load the files of the one job into the engine of the other."""

    def storage(job: Job) -> tuple[Any, ...]:
        kind = job.ds_config.get("optimizer", {}).get("type")
        kept = [job.ds_config.get(key) for key in STORAGE]
        return (job.layout, job.run.pipeline_schedule, job.run.precision, kind, kept)

    measured = "time" in (old.run.pipeline_balance, new.run.pipeline_balance)  # bounds of stages may move
    return storage(old) == storage(new) and not (measured and new.layout.pp > 1)


def obstacles(old: Job, new: Job) -> list[Problem]:
    """Return what keeps the job `new` from resuming from a checkpoint of the job `old`.

    Ranks, ZeRO stage, CPU offload, tensor, pipeline and sequence parallel degrees, precision and batch sizes may all
    change; docs/another-layout.md has the table.
    """
    same = same_storage(old, new)
    found = []
    for who, job in (("the checkpoint's DeepSpeed JSON", old), ("this run's DeepSpeed JSON", new)):
        for one in OBSTACLES:
            if one.applies(job.ds_config) and (one.always or not same):
                message, hint = f"{one.key} in {who}: {one.why}", f"take {one.instead}"
                found.append(Problem(kind="layout", message=message, hint=hint, where=one.key))
        if same:
            break  # the second JSON says what the first one does
    if _states(old) != _states(new):
        message = f"the checkpoint has the states of {_states(old)}, and this run trains with {_states(new)}"
        hint = f"take --optimizer {_states(old)}, or begin anew from the exported weights (`zerofit ckpt export`)"
        found.append(Problem(kind="optimizer", message=message, hint=hint, where="--optimizer"))
    return found


def piece_by_piece(job: Job) -> bool:
    """Return whether even an engine of the same layout is to be filled piece by piece.

    DeepSpeed stops at an elastic checkpoint of its own and at parameters that are on NVMe alone, comes back from
    optimizer states on NVMe without Adam's moments, and looks for a pipeline's layers in files that it does not write
    where experts are spread (runtime/engine.py, `_save_moe_checkpoint`).
    """
    config, layout = job.ds_config, job.layout
    nvme = any((_zero(config).get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))
    return nvme or bool(_zero(config).get("elastic_checkpoint")) or (layout.pp > 1 and layout.ep > 1)


def _states(job: Job) -> str:
    """Return which optimizer's states there are; Adam's and AdamW's are the same."""
    kind = _kind(job.ds_config)
    return "adamw" if kind == "adam" else run_name(kind)
