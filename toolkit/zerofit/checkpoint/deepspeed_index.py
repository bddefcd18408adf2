"""Index of a checkpoint that a DeepSpeed engine wrote, from the metadata in its files.

*mp_rank_MM_model_states.pt        names, shapes, ties, counters; the 16-bit weights below stage 3
*zero_pp_rank_R_*optim_states.pt   rank R's flat partitions: master weights and the optimizer's states
layer_NN-model_states.pt           a pipeline's weights, one file a layer
layer_L_expert_E_*, expp_rank_*    a mixture's experts, and their optimizer at stage 0
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.foreign import MODEL_STATES, OPTIM_STATES, Foreign
from zerofit.checkpoint.index import (
    MASTER,
    EngineIndex,
    Location,
    ParameterGroup,
    RankIndex,
    SavedBuffer,
    Shard,
    incomplete,
)
from zerofit.checkpoint.optimizer_names import state_names
from zerofit.checkpoint.store import STATE
from zerofit.spec.errors import Problem, UserError

LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
EXPERTS = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
Keys = list[str | int]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one checkpoint by rank. Each file is opened when it is needed; tensors stay on disk."""

    root: Path  # folder that the index's paths are relative to
    folder: Path
    models: dict[tuple[int, int], str]  # by (model parallel rank, data parallel rank)
    optimizers: dict[tuple[int, int], str]
    layers: dict[int, str]
    experts: list[str]
    expert_optimizers: dict[tuple[int, int], str]
    loaded: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Foreign) -> DeepSpeedFiles:
        """List the files of a checkpoint."""
        names = sorted(file.name for file in found.files.glob("*.pt"))
        by: dict[re.Pattern[str], dict[str, tuple[int, ...]]] = defaultdict(dict)
        for pattern in (MODEL_STATES, OPTIM_STATES, LAYER, EXPERT, EXPERT_OPTIM):
            for name in names:
                if match := pattern.fullmatch(name):
                    by[pattern][name] = tuple(int(number or 0) for number in match.groups())
        return cls(
            root=found.path,
            folder=found.files,
            models={(mp, dp): name for name, (dp, mp) in by[MODEL_STATES].items()},
            optimizers={(mp, dp): name for name, (dp, mp) in by[OPTIM_STATES].items()},
            layers={number[0]: name for name, number in by[LAYER].items()},
            experts=list(by[EXPERT]),
            expert_optimizers={(mp, ep): name for name, (ep, mp) in by[EXPERT_OPTIM].items()},
        )

    def load(self, name: str) -> Any:
        """Return a file's content; tensors stay on disk."""
        if name not in self.loaded:
            self.loaded[name] = safe_load.load(self.folder / name)
        return self.loaded[name]

    def at(self, name: str, keys: Keys, offset: int = 0) -> Location:
        """Return a place in a file."""
        return Location(file=(self.folder / name).relative_to(self.root).as_posix(), keys=keys, offset=offset)

    @property
    def model_ranks(self) -> list[int]:
        """The tensor or pipeline parallel ranks."""
        return sorted({mp for mp, _ in self.models} | {mp for mp, _ in self.optimizers})

    def model(self, mp: int) -> tuple[str, dict[str, Any]]:
        """Return a model parallel rank's model states: the file of its first data parallel rank, and its content."""
        name = next((name for (rank, _), name in sorted(self.models.items()) if rank == mp), None)
        if name is None:
            raise incomplete(self.folder, f"mp_rank_{mp:02}_model_states.pt is missing", MISSING)
        return name, self.load(name)

    def optimizer_ranks(self, mp: int) -> list[int]:
        """Return the data parallel ranks that wrote optimizer files, including ranks whose file is lost."""
        ranks = sorted(dp for rank, dp in self.optimizers if rank == mp)
        first = self.load(self.optimizers[mp, ranks[0]])["optimizer_state_dict"]
        counts = first.get("partition_count") or self.model(mp)[1].get("dp_world_size") or len(ranks)
        return [*range(max(*ranks, int(max(counts) if isinstance(counts, list | tuple) else counts) - 1) + 1)]

    def lost(self, mp: int) -> dict[int, str]:
        """Return the names of the optimizer's files that are missing, by rank."""
        rank, name = next((dp, name) for (other, dp), name in self.optimizers.items() if other == mp)
        missing = [dp for dp in self.optimizer_ranks(mp) if (mp, dp) not in self.optimizers]
        return {dp: name.replace(f"pp_rank_{rank}_", f"pp_rank_{dp}_") for dp in missing}


MISSING = "copy the files of all ranks into one folder; `zerofit ckpt verify` lists what is lost"


@dataclass(kw_only=True)
class _Parts:
    """The index while it is built."""

    order: dict[str, None] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    buffers: list[SavedBuffer] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: list[ParameterGroup] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], start: int, numel: int, where: dict[str, Location]) -> None:
        self.order[name] = None
        self.shards.append(Shard(name=name, shape=shape, cut=None, start=start, numel=numel, where=where))


def deepspeed_index(found: Foreign) -> RankIndex:
    """Build the index. Raises UserError "incomplete-checkpoint", "no-whole-view", "damaged-file", "unsafe-file"."""
    files, parts = DeepSpeedFiles.of(found), _Parts()
    for mp in files.model_ranks:
        _refuse_tensor_parallel(files, mp, parts)
        if found.stage_three:
            _add_stage_three(files, mp, parts)
        elif any(rank == mp for rank, _ in files.optimizers):
            _add_flat_groups(files, mp, parts)
    whole = _whole_weights(files)
    if not files.optimizers:
        _add_unpartitioned(files, whole, parts)
    if not found.stage_three:
        _add_rest(files, whole, parts)
    _, state = files.model(files.model_ranks[0])
    counters = _counters(files, state)
    parts.groups = parts.groups or _partitioned_groups(files, found.stage_three)
    listed: dict[str, None] = dict.fromkeys(state.get("module") or ()) | parts.order
    engine = EngineIndex(
        names=[name for name in listed if name in parts.order],
        parameters=parts.shards,
        buffers=parts.buffers,
        ties=parts.ties,
        counters=counters,
        unsupported=None,
        notes=parts.notes,
        lost=parts.lost,
        groups=parts.groups,
    )
    world = int(state.get("dp_world_size") or 1) * len(files.model_ranks)
    return RankIndex(world_size=world, engines={STATE: engine})


def _refuse_tensor_parallel(files: DeepSpeedFiles, mp: int, parts: _Parts) -> None:
    """Refuse shares of weights: only the program knows which dimension it cut."""
    state = files.model(mp)[1]
    names = {name for group in _groups(state) for name in group} or set(state.get("module") or {})
    tied = {name for name in names if name.startswith("tied_modules.")}
    if mp and (names - tied) & parts.order.keys():
        message = f"{files.folder} has the shares of {len(files.model_ranks)} tensor parallel ranks"
        hint = "gather it with the program that wrote it, e.g. engine.save_16bit_model or ds_to_universal"
        raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where=str(files.folder)))


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shapes of the flat groups; releases before 0.4 saved one dictionary."""
    shapes = state.get("param_shapes") or []
    return [shapes] if isinstance(shapes, dict) else list(shapes)


def _add_flat_groups(files: DeepSpeedFiles, mp: int, parts: _Parts) -> None:
    """Add the parameters of stages 1 and 2: group by group, each rank has the next part of the flat group."""
    _, state = files.model(mp)
    shapes = {name: tuple(shape) for group in _groups(state) for name, shape in group.items()}
    parts.ties |= state.get("shared_params") or {}
    done: dict[str, int] = defaultdict(int)
    already = set(parts.order)  # tied weights that an earlier pipeline stage also has
    lost = files.lost(mp)
    parts.lost += lost.values()
    for dp in files.optimizer_ranks(mp):
        file = files.optimizers.get((mp, dp), "")
        saved = files.load(file)["optimizer_state_dict"] if file else _lost_partition(files, mp)
        shuffled = (state.get("ds_config") or {}).get("zero_optimization", {}).get("round_robin_gradients")
        for group, fragments in enumerate(_fragments(saved, _groups(state), done, bool(shuffled))):
            for local, start, numel in fragments:
                name = _global_name(local, dp, state)
                if name in already or not numel:
                    continue
                if file:
                    where = _flat_locations(files, file, saved, group, start)
                else:
                    where = _replaced(files, mp, name, done[name], saved["kinds"])
                parts.add(name, shapes[local], done[name], numel, where)
                done[name] += numel


def _lost_partition(files: DeepSpeedFiles, mp: int) -> dict[str, Any]:
    """Return the sizes and kinds of a lost file's partition, which equal those of another rank's partition."""
    _, state = files.model(mp)
    if state.get("num_experts") or not state.get("module"):
        raise incomplete(files.folder, f"{', '.join(files.lost(mp).values())} is missing", MISSING)
    known = next(name for (rank, _), name in files.optimizers.items() if rank == mp)
    saved = files.load(known)["optimizer_state_dict"]
    sizes, kinds = [], []
    for group, flat in enumerate(saved["single_partition_of_fp32_groups"]):
        places = _flat_locations(files, known, saved, group, 0)
        padding = saved["group_paddings"][group] if saved.get("group_paddings") else 0
        sizes.append(flat.numel() + int(padding))
        kinds = [kind for kind in places if kind != MASTER]
    flats = [torch.empty(size, device="meta") for size in sizes]
    return {"single_partition_of_fp32_groups": flats, "kinds": kinds}


def _replaced(files: DeepSpeedFiles, mp: int, name: str, start: int, kinds: list[str]) -> dict[str, Location]:
    """Return the replacement of a lost stretch: weights from the model states, and zeros for the optimizer's states."""
    model = files.at(files.model(mp)[0], ["module", name], start)
    return {MASTER: model} | {kind: replace(model, lost=True) for kind in kinds}


def _partitioned_groups(files: DeepSpeedFiles, stage_three: bool) -> list[ParameterGroup]:
    """Return the optimizer's groups at stages 1 to 3. The groups of all pipeline stages are joined."""
    groups: list[ParameterGroup] = []
    for mp, file in sorted(
        (mp, name) for (mp, dp), name in files.optimizers.items() if dp == min(d for _, d in files.optimizers)
    ):
        saved = files.load(file)["optimizer_state_dict"]
        base = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict")
        shapes = _groups(files.model(mp)[1])
        entries = base["param_groups"] if isinstance(base, dict) else [{"params": [n]} for n in range(len(shapes))]
        for number, entry in enumerate(entries):
            own = entry["params"] if stage_three else [number]  # at stage 3 a group has sub-groups
            names = [name for member in own if member < len(shapes) for name in shapes[member]]
            settings = {key: value for key, value in entry.items() if key != "params"}
            if number < len(groups):
                names = [*groups[number].names, *(n for n in names if n not in groups[number].names)]
                groups[number] = ParameterGroup(names, settings)
            else:
                groups.append(ParameterGroup(names, settings))
    return groups


def _fragments(
    saved: dict[str, Any], groups: list[dict[str, Any]], done: dict[str, int], shuffled: bool
) -> Iterator[list[tuple[str, int, int]]]:
    """Yield for each group of a rank the parameters in its partition: name, first element there, elements.

    DeepSpeed saves them since 0.8 (`param_slice_mappings`), but not in the order of round_robin_gradients. Without this
    key, parameters follow one another as in `param_shapes`, each with its padding (`parameter_alignment`).
    """
    if saved.get("param_slice_mappings") and not shuffled:
        for mapping in saved["param_slice_mappings"]:
            yield [(name, fragment.start, fragment.numel) for name, fragment in mapping.items()]
        return
    paddings = saved.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for flat, shapes, padding in zip(_flat_weights(saved), groups, paddings, strict=True):
        fragments, place = [], 0
        for (name, shape), gap in zip(shapes.items(), padding, strict=True):
            rest = math.prod(shape) - done[name]
            if rest > 0 and place < flat.numel():
                fragments.append((name, place, min(rest, flat.numel() - place)))
                place += fragments[-1][2] + gap
        yield fragments


def _flat_weights(saved: dict[str, Any]) -> list[Tensor]:
    return saved.get("single_partition_of_fp32_groups") or saved["fp32_flat_groups"]


def _flat_locations(
    files: DeepSpeedFiles, file: str, saved: dict[str, Any], group: int, offset: int
) -> dict[str, Location]:
    """Return the places of a stretch of a flat group: of its master weights, and of each state with the same length."""
    own: Keys = ["optimizer_state_dict"]
    key = "single_partition_of_fp32_groups" if "single_partition_of_fp32_groups" in saved else "fp32_flat_groups"
    where = {MASTER: files.at(file, [*own, key, group], offset)}
    if isinstance(saved.get("base_optimizer_state"), list):  # elastic checkpoints
        keys: Keys = [*own, "base_optimizer_state", group]
        states = saved["base_optimizer_state"][group] if group < len(saved["base_optimizer_state"]) else {}
    else:
        inner = "base_optimizer_state" if "base_optimizer_state" in saved else "optimizer_state_dict"
        base = saved[inner]
        # stage 3 has a state for each sub-group, stages 1 and 2 for each parameter group
        numbers = [number for entry in base["param_groups"] for number in entry["params"]]
        number = numbers[group] if group < len(numbers) else group
        keys, states = [*own, inner, "state", number], base["state"].get(number, {})
    length = saved[key][group].numel()
    for kind, value in states.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() >= length:
            where[kind] = files.at(file, [*keys, kind], offset)
    return where


def _global_name(local: str, dp: int, state: dict[str, Any]) -> str:
    """Return the name of a parameter in the full model: a rank numbers its own experts from 0."""
    match = EXPERTS.fullmatch(local)
    if match is None or not state.get("num_experts"):
        return local
    mine = {int(m[2]) for group in _groups(state) for name in group if (m := EXPERTS.fullmatch(name))}
    count = max(mine) + 1
    total = state["num_experts"]
    ranks = max(1, (total[0] if isinstance(total, list) else total) // count)  # that share the experts
    return f"{match[1]}{dp % ranks * count + int(match[2])}{match[3]}"


def _add_stage_three(files: DeepSpeedFiles, mp: int, parts: _Parts) -> None:
    """Add the parameters of stage 3: each rank has an equal part of each, in sub-groups of flat partitions."""
    state = files.model(mp)[1]
    shapes = {name: tuple(shape) for group in _groups(state) for name, shape in group.items()}
    parts.ties |= state.get("shared_params") or {}
    ranks = files.optimizer_ranks(mp)
    if lost := files.lost(mp):
        raise incomplete(files.folder, f"{', '.join(lost.values())} is missing, and no file has its weights", MISSING)
    for dp in ranks:
        file = files.optimizers[mp, dp]
        saved = files.load(file)["optimizer_state_dict"]
        group, offset, lengths = 0, 0, [flat.numel() for flat in saved["fp32_flat_groups"]]
        for name, shape in shapes.items():
            total = math.prod(shape)
            share = -(-total // len(ranks))
            while offset + share > lengths[group]:
                if offset < lengths[group]:
                    raise incomplete(files.folder, f"{file}: a sub-group ends within {name}", MISSING)
                group, offset = group + 1, 0
            numel = min(share, total - dp * share)
            if numel > 0:
                parts.add(name, shape, dp * share, numel, _flat_locations(files, file, saved, group, offset))
            offset += share
    _add_frozen_partitions(files, mp, ranks, parts)


def _add_frozen_partitions(files: DeepSpeedFiles, mp: int, ranks: list[int], parts: _Parts) -> None:
    """Add stage 3's frozen weights and buffers, from the model states of all ranks."""
    for dp in ranks:
        if (mp, dp) not in files.models:
            missing = f"zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt"
            raise incomplete(files.folder, f"{missing} is missing", MISSING)
        name = files.models[mp, dp]
        state = files.load(name)
        for frozen, shape in (state.get("frozen_param_shapes") or {}).items():
            total, share = math.prod(shape), -(-math.prod(shape) // len(ranks))
            numel = min(share, total - dp * share)
            if numel > 0 and frozen not in parts.ties:
                where = {MASTER: files.at(name, ["frozen_param_fragments", frozen])}
                parts.add(frozen, tuple(shape), dp * share, numel, where)
        for buffer in state.get("buffer_names") or []:
            if dp == 0 and buffer in state["module"]:
                parts.buffers.append(SavedBuffer(buffer, files.at(name, []).file, ["module", buffer]))


def _whole_weights(files: DeepSpeedFiles) -> dict[str, tuple[str, Keys, Tensor]]:
    """Return the weights that are saved in full, by name: file, keys, tensor."""
    whole: dict[str, tuple[str, Keys, Tensor]] = {}
    for number, name in sorted(files.layers.items()):
        whole |= {f"{number}.{key}": (name, [key], value) for key, value in files.load(name).items()}
    for mp in files.model_ranks:
        name, state = files.model(mp)
        whole |= {key: (name, ["module", key], value) for key, value in (state.get("module") or {}).items()}
    for name in files.experts:
        whole |= {key: (name, [key], value) for key, value in files.load(name).items()}
    return {name: entry for name, entry in whole.items() if isinstance(entry[2], Tensor) and entry[2].numel()}


def _add_rest(files: DeepSpeedFiles, whole: dict[str, tuple[str, Keys, Tensor]], parts: _Parts) -> None:
    """Add tensors without optimizer states: frozen weights, buffers, other names of tied weights."""
    buffers = {name for mp in files.model_ranks for name in files.model(mp)[1].get("buffer_names") or []}
    for name, (file, keys, value) in whole.items():
        if name in parts.order or name in parts.ties:
            continue
        where = files.at(file, keys)
        if name in buffers or not value.is_floating_point():
            parts.buffers.append(SavedBuffer(name, where.file, keys))
        else:
            parts.add(name, tuple(value.shape), 0, value.numel(), {MASTER: where})


def _add_unpartitioned(files: DeepSpeedFiles, whole: dict[str, tuple[str, Keys, Tensor]], parts: _Parts) -> None:
    """Add the parameters of stage 0. Its optimizer numbers them in the order of its groups."""
    buffers = {name for mp in files.model_ranks for name in files.model(mp)[1].get("buffer_names") or []}
    places: dict[tuple[int, int], str] = {}
    for name, (_, _, value) in whole.items():
        first = places.setdefault((value.untyped_storage().data_ptr(), int(value.storage_offset())), name)
        if first != name and tuple(value.shape) == tuple(whole[first][2].shape):
            parts.ties[name] = first
    shapes = {n: tuple(v.shape) for n, (_, _, v) in whole.items() if n not in buffers and n not in parts.ties}
    done = 0
    for key, file in (files.expert_optimizers or {(mp, 0): files.model(mp)[0] for mp in files.model_ranks}).items():
        saved = files.load(file).get("optimizer")
        if not saved:
            continue
        base = saved.get("optimizer_state_dict", saved)
        local = _experts_of(shapes, files, key)
        if files.layers:  # a stage of a pipeline has the next layers
            count = sum(len(group["params"]) for group in base["param_groups"])
            local, done = dict(list(shapes.items())[done : done + count]), done + count
        groups = state_names(base, local, saved.get("fp32_groups"))
        if groups is None:
            parts.notes.append(f"the optimizer's states in {file} cannot be matched with the parameters' names")
            continue
        for number, (named, entry) in enumerate(zip(groups, base["param_groups"], strict=True)):
            settings = {key: value for key, value in entry.items() if key != "params"}
            parts.groups.append(ParameterGroup([name for _, name in named], settings))
            for name, where in _unpartitioned_places(files, file, saved, number, named, whole):
                if name not in parts.order:
                    parts.add(name, shapes[name], 0, math.prod(shapes[name]), where)


def _unpartitioned_places(
    files: DeepSpeedFiles,
    file: str,
    saved: dict[str, Any],
    group: int,
    named: list[tuple[int, str]],
    whole: dict[str, tuple[str, Keys, Tensor]],
) -> Iterator[tuple[str, dict[str, Location]]]:
    """Yield the parameters of a group and their places: one by one, or in flat tensors (DeepSpeed's FP16_Optimizer)."""
    flat, offset = "fp32_groups_flat" in saved, 0
    inner: Keys = ["optimizer", "optimizer_state_dict"] if "optimizer_state_dict" in saved else ["optimizer"]
    base = saved.get("optimizer_state_dict", saved)
    for number, (index, name) in enumerate(named):
        own, keys, value = whole[name]
        where = {MASTER: files.at(own, keys)}
        if "fp32_groups" in saved:
            where[MASTER] = files.at(file, ["optimizer", "fp32_groups", group, number])
        elif flat:
            where[MASTER] = files.at(file, ["optimizer", "fp32_groups_flat", group], offset)
            index = base["param_groups"][group]["params"][0]
        for kind, state in base["state"].get(index, {}).items():
            if isinstance(state, Tensor) and state.dim() and state.numel() >= value.numel():
                where[kind] = files.at(file, [*inner, "state", index, kind], offset if flat else 0)
        yield name, where
        offset += value.numel()


def _experts_of(
    shapes: dict[str, tuple[int, ...]], files: DeepSpeedFiles, key: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return a rank's parameters in a mixture of experts: the shared parameters, and the rank's own experts."""
    numbers = {name: int(match[2]) for name in shapes if (match := EXPERTS.fullmatch(name))}
    if not files.expert_optimizers or not numbers:
        return shapes
    each = (1 + max(numbers.values())) // len({expert_rank for _, expert_rank in files.expert_optimizers}) or 1
    return {name: s for name, s in shapes.items() if name not in numbers or numbers[name] // each == key[1]}


def _counters(files: DeepSpeedFiles, state: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of the run, as `train.shard_index` writes them."""
    file = next(iter(files.optimizers.values()), None)
    saved = files.load(file)["optimizer_state_dict"] if file else (state.get("optimizer") or {})
    # the new run has its own schedule; only the position is taken from the file
    schedule = state.get("lr_scheduler") or {"last_epoch": int(state.get("global_steps") or 0)}
    scaler = saved.get("loss_scaler")
    return {
        "step": step_count(saved),
        "global_steps": int(state.get("global_steps") or 0),
        "skipped_steps": int(state.get("skipped_steps") or 0),
        "global_samples": int(state.get("global_samples") or 0),
        "lr_scheduler": {k: v for k, v in schedule.items() if type(v) in (int, float)},
        "schedule": state.get("lr_scheduler"),
        "loss_scaler": {k: getattr(scaler, k) for k in SCALER if hasattr(scaler, k)} or None,
    }


def step_count(saved: Any) -> int | None:
    """Return the optimizer's step count at any depth of its state dict."""
    if isinstance(saved, dict):
        values: Any = saved.values()
        if "step" in saved and isinstance(saved["step"], int | float | Tensor):
            return int(saved["step"])
    elif isinstance(saved, list | tuple):
        values = saved
    else:
        return None
    return next((step for value in values if (step := step_count(value)) is not None), None)
