"""Changes of the configuration that make it impossible to resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.features.optimizers import ENTRIES, of_json
from zerofit.features.zero import ZERO_FEATURES
from zerofit.spec.errors import Problem
from zerofit.spec.run_folder import Job

Config = dict[str, Any]


@dataclass(frozen=True)
class Obstacle:
    """A setting that prevents a resume in another layout or, with `always`, in every layout."""

    key: str  # in the DeepSpeed JSON
    applies: Callable[[Config], bool]
    why: str
    instead: str
    always: bool = False  # prevents a resume even in the same layout


def _zero(config: Config) -> Config:
    return config.get("zero_optimization", {})


def _kind(config: Config) -> str:
    return str(config.get("optimizer", {}).get("type", "")).lower()


# State with one value per weight (weights, Adam's moments) can be split again for another layout. These settings have
# other state, or state that DeepSpeed does not save.
OBSTACLES = (
    *(
        Obstacle(feature.path, feature.on, f"DeepSpeed does not save {feature.unsaved}", feature.instead, always=True)
        for feature in ZERO_FEATURES
        if feature.unsaved
    ),
    Obstacle(
        "optimizer.type",
        lambda c: _kind(c) in ("onebitadam", "zerooneadam", "onebitlamb"),
        "1-bit optimizers keep compression errors per rank",
        "AdamW",
    ),
    *(
        Obstacle(
            "optimizer.type",
            lambda c, entry=entry: of_json(_kind(c)) is entry,
            entry.states.unconvertible,
            "the layout that wrote the checkpoint, or start from the exported weights",
        )
        for entry in ENTRIES
        if not entry.states.by_weight
    ),
    Obstacle(
        "data_efficiency",
        lambda c: bool(c.get("data_efficiency", {}).get("enabled")) or bool(c.get("curriculum_learning")),
        "the state of curriculum learning and random-LTD cannot be converted to another layout",
        "the layout that wrote the checkpoint",
    ),
)


# Keys of the DeepSpeed JSON that determine the tensors in its files and how they are split.
STORAGE = ("zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "tensor_parallel")


def same_storage(old: Job, new: Job) -> bool:
    """Return whether DeepSpeed can load the files of job `old` into the engine of job `new`."""

    def storage(job: Job) -> tuple[object, ...]:
        kind = job.ds_config.get("optimizer", {}).get("type")
        settings = [job.ds_config.get(key) for key in STORAGE]
        return (job.layout, job.run.pipeline_schedule, job.run.precision, kind, settings)

    measured = "time" in (old.run.pipeline_balance, new.run.pipeline_balance)  # stages may be split differently
    return storage(old) == storage(new) and not (measured and new.layout.pp > 1)


def obstacles(old: Job, new: Job) -> list[Problem]:
    """Return why the job `new` cannot resume from a checkpoint of the job `old`.

    Ranks, ZeRO stage, CPU offload, tensor, pipeline and sequence parallel degrees, precision and batch sizes may
    change; docs/another-layout.md has the table.
    """
    # In the same layout DeepSpeed loads its own files. Then the only obstacle is state that it does not save.
    same = same_storage(old, new)
    problems = []
    for who, job in (("the checkpoint's DeepSpeed JSON", old), ("this run's DeepSpeed JSON", new)):
        for obstacle in OBSTACLES:
            if obstacle.applies(job.ds_config) and (obstacle.always or not same):
                message, hint = f"{obstacle.key} in {who}: {obstacle.why}", f"use {obstacle.instead}"
                problems.append(Problem(kind="layout", message=message, hint=hint, where=obstacle.key))
        if same:
            break  # the second JSON has the same settings
    if _states(old) != _states(new):
        message = f"the checkpoint has states of {_states(old)}, but this run trains with {_states(new)}"
        hint = f"use --optimizer {_states(old)}, or start from the exported weights (`zerofit ckpt export`)"
        problems.append(Problem(kind="optimizer", message=message, hint=hint, where="--optimizer"))
    return problems


def piece_by_piece(job: Job) -> bool:
    """Return whether zerofit must load the tensors instead of DeepSpeed.

    This can be so even for the same layout. DeepSpeed fails on its own elastic checkpoints and on parameters on NVMe.
    It does not restore Adam's moments from NVMe. In a pipeline with expert parallelism, DeepSpeed does not save the
    layer files that its own loading needs (runtime/engine.py, `_save_moe_checkpoint`).
    """
    config, layout = job.ds_config, job.layout
    nvme = any((_zero(config).get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param"))
    return nvme or bool(_zero(config).get("elastic_checkpoint")) or (layout.pp > 1 and layout.ep > 1)


def _states(job: Job) -> str:
    """Return the optimizer of the states. Types with equal states count as one."""
    entry, kind = of_json(_kind(job.ds_config)), _kind(job.ds_config)
    return entry.name if entry else kind
