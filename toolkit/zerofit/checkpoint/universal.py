"""A checkpoint turned into DeepSpeed's universal format, which its own engines load under another number of ranks.

    OUT/latest_universal                              the tag below
    OUT/step-00000100/zero/NAME/fp32.pt, exp_avg.pt   each parameter and optimizer state whole: {"param": tensor}
    OUT/step-00000100/zero/NAME/step.pt               the optimizer's step count
    OUT/step-00000100/zero/optimizer_state.pt         parameter groups, loss scaler, versions
    OUT/step-00000100/*mp_rank_00_model_states.pt     counters and learning rate schedule, without weights

DeepSpeed's own converter writes what the stage of its source needs. This has what stages 1 and 2 look for
(runtime/base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir) and what stage 3 does (runtime/zero/stage3.py,
load_hp_checkpoint_state_from_checkpoint_dir_stage3), so that each of them loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.locate import manifest_of
from zerofit.checkpoint.manifest import Manifest
from zerofit.checkpoint.names import STATE, folder_name
from zerofit.checkpoint.staging import refuse_existing, refuse_small_disk, written_aside
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.units import shown_bytes

# files that an engine of stage 0, 1 or 2, and one of stage 3, takes its counters from
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "ds_version")
GLOBALS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage")


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What was written."""

    out: Path
    tag: str
    parameters: int  # elements
    bytes: int


def convert(checkpoint: Path, out: Path, progress: Callable[[str], None] = lambda _: None) -> ConvertResult:
    """Write a checkpoint's folder as a universal checkpoint into `out`, which must not exist or be empty.

    An engine loads it with `load_checkpoint(out)` and "checkpoint": {"load_universal": true}. A GAN's second engine
    gets a tag of its own, which ends in -generator. Memory: one tensor at a time. Raises UserError.
    """
    refuse_existing(out)
    manifest = manifest_of(checkpoint)
    tag = folder_name(manifest.step)
    tags = {STATE: tag} | ({"generator": f"{tag}-generator"} if manifest.job["facts"]["task"] == "gan" else {})
    wholes = {engine: FullState(checkpoint, engine) for engine in tags}
    total = sum(4 * _numel(w, name) * len(w.kinds(name)) for w in wholes.values() for name in w.names)
    refuse_small_disk(out, total)
    with written_aside(out) as aside:
        done = 0
        for engine, whole in wholes.items():
            for written in _write_engine(checkpoint / engine, whole, manifest, aside / tags[engine]):
                done += written
                progress(f"converting {shown_bytes(done)} of {shown_bytes(total)}")
        (aside / "latest_universal").write_text(tag)
    parameters = sum(_numel(whole, name) for whole in wholes.values() for name in whole.names)
    return ConvertResult(out=out, tag=tag, parameters=parameters, bytes=total)


def _write_engine(state: Path, whole: FullState, manifest: Manifest, folder: Path) -> Iterator[int]:
    """Write one engine's files; bytes of tensors as they are written."""
    counters, held = _counters(state), _held_by_optimizer(state)
    for name in whole.names:
        place = folder / "zero" / name
        place.mkdir(parents=True)
        for kind in whole.kinds(name):
            torch.save({"param": whole.read(name, kind).contiguous(), "cat_dim": 0}, place / f"{kind}.pt")
            yield 4 * _numel(whole, name)
        if held["step"] is not None:
            torch.save(held["step"], place / "step.pt")
    torch.save(_optimizer_state(held, counters), folder / "zero" / "optimizer_state.pt")
    model_states = counters | {"dp_world_size": manifest.job["layout"]["dp"], "mp_world_size": 1, "module": {}}
    for file in MODEL_STATES:
        torch.save(model_states, folder / file)


def _counters(state: Path) -> dict[str, Any]:
    """What every rank's model states file says alike."""
    files = sorted(state.glob("*model_states.pt"))
    files = [file for file in files if "mp_rank" in file.name]  # a pipeline's layers have files too
    said = safe_load.load(files[0], for_engine=True)
    return {key: said[key] for key in COUNTERS if key in said}


def _held_by_optimizer(state: Path) -> dict[str, Any]:
    """What is not a part of one parameter: the globals of ZeRO's optimizer, the parameter groups, the step count."""
    files = sorted(state.glob("*_optim_states.pt")) or sorted(state.glob("mp_rank_*_model_states.pt"))
    said = safe_load.load(files[0], for_engine=True)
    own = _own_state(said)
    if own is None:
        message = f"{files[0]} holds no state of an optimizer"
        hint = "only checkpoints of a run can be converted, after one step or more"
        raise UserError(Problem(kind="no-optimizer", message=message, hint=hint, where="PATH"))
    zero = said.get("optimizer_state_dict") or {}
    states = own["state"].values() if isinstance(own["state"], dict) else own["state"]
    steps = [held["step"] for held in states if "step" in held] + [
        g["step"] for g in own["param_groups"] if "step" in g
    ]
    groups = [{key: value for key, value in g.items() if key != "params"} for g in own["param_groups"]]
    return {"globals": {key: zero[key] for key in GLOBALS if key in zero}, "groups": groups, "step": _copy(steps)}


def _own_state(said: Any) -> dict[str, Any] | None:
    """The state dict of torch's own optimizer, as deep as the stage's optimizers keep it."""
    if not isinstance(said, dict):
        return None
    if "state" in said and "param_groups" in said:
        return said
    return next((own for value in said.values() if (own := _own_state(value)) is not None), None)


def _copy(steps: list[Any]) -> Any:
    """The first step count by itself: one that is a tensor would be saved with the whole file that it lies in."""
    if not steps:
        return None
    return steps[0].clone() if isinstance(steps[0], Tensor) else steps[0]


def _optimizer_state(held: dict[str, Any], counters: dict[str, Any]) -> dict[str, Any]:
    """Where stages 1 and 2, and where stage 3 look for the parameter groups and the step."""
    inner = {"state": {0: {"step": held["step"]}}, "param_groups": held["groups"]}
    known = held["globals"] | {"ds_version": counters["ds_version"], "param_groups": held["groups"]}
    return known | {"optimizer_state_dict": inner}


def _numel(whole: FullState, name: str) -> int:
    return torch.Size(whole.shape(name)).numel()
