"""Convert a checkpoint to DeepSpeed's universal format.

DeepSpeed loads it with any number of ranks.

    OUT/latest_universal                              the tag below
    OUT/step-00000100/zero/NAME/fp32.pt, exp_avg.pt   each full parameter and optimizer state: {"param": tensor}
    OUT/step-00000100/zero/NAME/step.pt               the optimizer's step count
    OUT/step-00000100/zero/optimizer_state.pt         parameter groups, loss scaler, versions
    OUT/step-00000100/*mp_rank_00_model_states.pt     counters and learning rate schedule, without weights

DeepSpeed's own converter writes only the files for the ZeRO stage of its source. This converter writes files for all
stages: those that stages 1 and 2 read (runtime/base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir), and
those that stage 3 reads (runtime/zero/stage3.py, load_hp_checkpoint_state_from_checkpoint_dir_stage3).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.conversion import (
    ConvertResult,
    conversion_plan,
    forecast,
    groups_of,
    loss_scaling,
    no_optimizer,
    progress,
)
from zerofit.checkpoint.foreign import foreign_at
from zerofit.checkpoint.foreign_facts import facts_of
from zerofit.checkpoint.full_state import GAN_ENGINES, ONE_ENGINE, FullState
from zerofit.checkpoint.index import HINT
from zerofit.checkpoint.model_folder import refuse_small_disk, staged_folder
from zerofit.checkpoint.store import STATE, Manifest, folder_name, is_own, manifest_of
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write
from zerofit.spec.run import Run

# the files with an engine's counters: for stages 0 to 2, and for stage 3
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
GLOBALS = ("overflow", "clip_grad", "zero_stage")


def convert(
    checkpoint: Path, out: Path, report: Reporter | None = None, run: Run | None = None, repair: bool = False
) -> ConvertResult:
    """Convert a checkpoint to a universal checkpoint in `out`, a new or empty folder.

    An engine loads it with `load_checkpoint(out)` and "checkpoint": {"load_universal": true}. A GAN's second engine has
    its own tag, which ends in -generator. Only one tensor is in memory at a time. If another program wrote the
    checkpoint, `run` describes its model. `repair` replaces the data of a lost rank. Raises UserError.
    """
    report = report or Reporter()
    sources, step, ranks = _sources(checkpoint)
    tag = folder_name(step)
    tags = {engine: tag if engine == STATE else f"{tag}-{engine}" for engine in sources}
    states = {engine: FullState(checkpoint, {engine: ""}, repair, run) for engine in sources}
    for engine, state in states.items():
        for repaired in state.repaired:
            report.note(repaired)
        # plain SGD has no states, but DeepSpeed's files have its settings
        if not state.has_states and (state.notes or sources[engine] is None):
            raise no_optimizer(state, str(checkpoint))
        if lost := _not_loaded(state):
            report.note(f"load_universal does not load {lost}: load them in the script, or use --to deepspeed")
    total = sum(4 * state.numel(name) * len(state.kinds(name)) for state in states.values() for name in state.names)
    refuse_small_disk(out, total)
    report.note(forecast(states[STATE], total, out))
    wrote = progress(report, total)
    with staged_folder(out, plan=conversion_plan(checkpoint, run and run.model, repair)) as staging:
        for engine, state in states.items():
            for written in _write_engine(sources[engine], state, ranks, staging / tags[engine], report):
                wrote(written)
        # of a GAN's two engines only the discriminator is found by itself; a script names the other's tag
        (staging / "latest_universal").write_text(tag)
    parameters = sum(state.numel(name) for state in states.values() for name in state.names)
    return ConvertResult(out=out, tag=tag, parameters=parameters, bytes=total)


def _not_loaded(state: FullState) -> str:
    """Name what DeepSpeed does not load (runtime/engine.py, _load_checkpoint)."""
    trained = {name for group in state.groups for name in group.names}
    frozen = [name for name in state.names if name not in trained] if trained else []
    kinds = (("buffers", state.buffers), ("frozen weights", frozen))
    return " and ".join(f"{len(names)} {kind} ({names[0]}, ...)" for kind, names in kinds if names)


# runtime/zero/stage3.py, load_hp_checkpoint_state_from_checkpoint_dir_stage3
def _unequal_settings(groups: list[dict[str, Any]]) -> str:
    """Name the optimizer's settings that differ between groups."""
    settings = [key for key in (groups or [{}])[0] if key not in ("name", "param_names")]
    return ", ".join(key for key in settings if any(group.get(key) != groups[0][key] for group in groups))


def _sources(checkpoint: Path) -> tuple[dict[str, Path | None], int, int]:
    """Return the folder of each engine's files, the step, and the data parallel degree.

    The folder is None if DeepSpeed did not write the files.
    """
    if not is_own(checkpoint) and (found := foreign_at(checkpoint)):
        facts = facts_of(found)
        source = found.files if found.format == "deepspeed" else None
        return {STATE: source}, facts.step or 0, facts.layout.dp if facts.layout else facts.ranks or 1
    manifest = manifest_of(checkpoint)
    refuse_without_frozen(checkpoint, manifest)
    engines = GAN_ENGINES if manifest.job.facts.task == "gan" else ONE_ENGINE
    return {engine: checkpoint / engine for engine in engines}, manifest.step, manifest.job.layout.dp


def refuse_without_frozen(checkpoint: Path, manifest: Manifest) -> None:
    """Raise UserError "no-whole-view" if a checkpoint has only the trained part of the model."""
    if manifest.frozen:
        message = f"{checkpoint} has no frozen weights, but other programs need the full model"
        hint = "`zerofit train --resume` reads it in any layout; `zerofit ckpt export --merge` writes the full model"
        raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where="PATH"))


def _write_engine(source: Path | None, state: FullState, ranks: int, folder: Path, report: Reporter) -> Iterator[int]:
    """Write one engine's files into `folder`. Yield the size of each tensor in bytes.

    FullState has refused names that point outside the folder.
    """
    try:
        counters, optimizer = engine_facts(source, state)
    except (LookupError, TypeError, AttributeError) as error:
        message = f"DeepSpeed did not write the files in {source}: {type(error).__name__}: {error}"
        raise UserError(Problem(kind="incomplete-checkpoint", message=message, hint=HINT, where="PATH")) from None
    if differ := _unequal_settings(optimizer["groups"]):
        what = f"at ZeRO 3, load_universal gives all groups the {differ} of the first group"
        report.note(f"{what}: set them after loading, or use --to deepspeed")
    for name in state.names:
        place = folder / "zero" / name
        place.mkdir(parents=True, exist_ok=True)
        for kind in state.kinds(name):
            if not (place / f"{kind}.pt").exists():  # of an interrupted conversion
                _save({"param": state.read(name, kind).contiguous(), "cat_dim": 0}, place / f"{kind}.pt")
            yield 4 * state.numel(name)
        if optimizer["step"] is not None:
            _save(optimizer["step"], place / "step.pt")
    # parameter groups and step, in the places for stages 1 and 2, and for stage 3
    shared = optimizer["globals"] | {"ds_version": counters["ds_version"], "param_groups": optimizer["groups"]}
    inner = {"state": {0: {"step": optimizer["step"]}}, "param_groups": optimizer["groups"]}
    _save(shared | {"optimizer_state_dict": inner}, folder / "zero" / "optimizer_state.pt")
    # Both names get the same content: stages 0 to 2 look for the first file, stage 3 for the second.
    # With load_universal, an engine reads the weights from zero/ and not from `module` (runtime/engine.py).
    model_states = counters | {"dp_world_size": ranks, "mp_world_size": 1, "module": {}}
    groups = groups_of(state)
    if len(groups) == len(optimizer["groups"]):
        model_states["param_shapes"] = [{name: torch.Size(state.shape(name)) for name in g.names} for g in groups]
    for file in MODEL_STATES:
        _save(model_states, folder / file)


def engine_facts(source: Path | None, state: FullState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the counters of an engine, and the globals, groups and step of its optimizer.

    Without DeepSpeed's files (`source` is None), use the counters in the index. Raises UserError "no-optimizer".
    """
    numbers = state.counters.get("loss_scaler")  # without them an engine keeps its own scaler
    scaling = loss_scaling(numbers, fp16=True) if numbers else {}
    if source is not None:
        optimizer = _optimizer_globals(source)
        if optimizer is None:
            raise no_optimizer(state, str(source))
        return _counters(source), optimizer | {"globals": optimizer["globals"] | scaling}
    counters = {key: state.counters[key] for key in COUNTERS} | {"ds_version": version("deepspeed")}
    groups = [group.settings for group in state.groups]
    step = torch.tensor(float(state.counters["step"]))
    return counters, {"globals": {"overflow": False, **scaling}, "groups": groups, "step": step}


def _save(value: object, path: Path) -> None:
    with atomic_write(path) as file:
        torch.save(value, file)


def _counters(source: Path) -> dict[str, object]:
    """Return the counters, which are equal in the model states files of all ranks."""
    files = sorted(source.glob("*model_states.pt"))
    files = [file for file in files if "mp_rank" in file.name]  # a pipeline's layers have files too
    saved = safe_load.load(files[0])
    return {"ds_version": saved["ds_version"]} | {key: saved[key] for key in COUNTERS if key in saved}


def _optimizer_globals(source: Path) -> dict[str, Any] | None:
    """Return the optimizer's state that is not per parameter: globals, groups, step count."""
    # Stage 0 has no optimizer files: its states are in the model states.
    files = sorted(source.glob("*_optim_states.pt")) or sorted(source.glob("mp_rank_*_model_states.pt"))
    saved = safe_load.load(files[0])
    own = _own_state(saved)
    if own is None:
        return None
    zero = saved.get("optimizer_state_dict") or {}
    states = own["state"].values() if isinstance(own["state"], dict) else own["state"]
    step = next((entry["step"] for entry in (*states, *own["param_groups"]) if "step" in entry), None)
    if isinstance(step, Tensor):
        step = step.clone()  # without a copy, torch.save would write the tensor's full storage
    groups = [{key: value for key, value in g.items() if key != "params"} for g in own["param_groups"]]
    return {"globals": {key: zero[key] for key in GLOBALS if key in zero}, "groups": groups, "step": step}


def _own_state(saved: object) -> dict[str, Any] | None:
    if not isinstance(saved, dict):
        return None
    if "state" in saved and "param_groups" in saved:
        return saved
    return next((own for value in saved.values() if (own := _own_state(value)) is not None), None)
