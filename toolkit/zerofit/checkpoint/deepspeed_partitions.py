"""The index of the flat partitions of ZeRO 1 to 3."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.deepspeed_files import EXPERTS, MISSING, DeepSpeedFiles, Keys, Parts, flat_groups, lacks_experts
from zerofit.checkpoint.foreign import weight_files
from zerofit.checkpoint.index import MASTER, Location, ParameterGroup, SavedBuffer, incomplete
from zerofit.checkpoint.optimizer_names import weight_states


def add_flat_groups(files: DeepSpeedFiles, mp: int, parts: Parts) -> None:
    """Add the parameters of stages 1 and 2. Ranks have consecutive parts of each flat group."""
    _, state = files.model(mp)
    shapes = {name: tuple(shape) for group in flat_groups(state) for name, shape in group.items()}
    parts.ties |= state.get("shared_params") or {}
    done: dict[str, int] = defaultdict(int)  # elements of each parameter in the partitions of earlier ranks
    lost = files.lost(mp)
    parts.lost += lost.values()
    for dp in files.optimizer_ranks(mp):
        file = files.optimizers.get((mp, dp), "")
        saved = files.load(file)["optimizer_state_dict"] if file else _lost_partition(files, mp)
        shuffled = (state.get("ds_config") or {}).get("zero_optimization", {}).get("round_robin_gradients")
        # ranks of different experts have the same names for them in their files
        names = {local: _global_name(local, dp, state) for local in shapes}
        before = {local: done[name] for local, name in names.items()}
        for group, fragments in enumerate(_fragments(saved, flat_groups(state), before, bool(shuffled))):
            for local, start, numel in fragments:
                name = names[local]
                if file:
                    where = _flat_locations(files, file, saved, group, start)
                else:
                    where = _replaced(files.at(files.model(mp)[0], ["module", name], done[name]), saved["kinds"])
                parts.add(mp, name, shapes[local], done[name], numel, where)
                done[name] += numel


def _lost_partition(files: DeepSpeedFiles, mp: int) -> dict[str, Any]:
    """Return sizes and kinds of a lost file's tensors, which are the same on all ranks."""
    _, state = files.model(mp)
    # Without a module there are no weights to copy. With experts, each rank has other ones, so no copy is complete.
    if state.get("num_experts") or not state.get("module"):
        raise incomplete(files.folder, f"{', '.join(files.lost(mp).values())} is missing", MISSING)
    known = next(name for (rank, _), name in files.optimizers.items() if rank == mp)
    saved = files.load(known)["optimizer_state_dict"]
    sizes, kinds = [], []
    for group, flat in enumerate(saved["single_partition_of_fp32_groups"]):
        places = _flat_locations(files, known, saved, group, 0)
        padding = saved["group_paddings"][group] if saved.get("group_paddings") else 0
        # All partitions have the same size in memory, but files lack the padding at the end of the last one.
        sizes.append(flat.numel() + int(padding))
        kinds = [kind for kind in places if kind != MASTER]
    flats = [torch.empty(size, device="meta") for size in sizes]
    return {"single_partition_of_fp32_groups": flats, "kinds": kinds}


def _replaced(copy: Location, kinds: Iterable[str]) -> dict[str, Location]:
    """Return the replacement of a lost stretch: weights from `copy`, and zeros for states."""
    return {kind: replace(copy, lost=kind != MASTER) for kind in (MASTER, *kinds)}


def partitioned_groups(files: DeepSpeedFiles, stage_three: bool) -> list[ParameterGroup]:
    """Return the optimizer's groups at stages 1 to 3, joined over all pipeline stages."""
    groups: list[ParameterGroup] = []
    first_rank = min((dp for _, dp in files.optimizers), default=0)  # groups are equal on all data parallel ranks
    for mp, file in sorted((mp, name) for (mp, dp), name in files.optimizers.items() if dp == first_rank):
        saved = files.load(file)["optimizer_state_dict"]
        base = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict")
        shapes = flat_groups(files.model(mp)[1])
        entries = base["param_groups"] if isinstance(base, dict) else [{"params": [n]} for n in range(len(shapes))]
        for number, entry in enumerate(entries):
            own = entry["params"] if stage_three else [number]  # at stage 3 a group has sub-groups
            names = [name for member in own if member < len(shapes) for name in shapes[member]]
            settings = {key: value for key, value in entry.items() if key != "params"}
            if number < len(groups):  # started by an earlier stage, which listed only its own parameters
                names = [*groups[number].names, *(n for n in names if n not in groups[number].names)]
                groups[number] = ParameterGroup(names, settings)
            else:
                groups.append(ParameterGroup(names, settings))
    return groups


def _fragments(
    saved: dict[str, Any], groups: list[dict[str, torch.Size]], done: dict[str, int], shuffled: bool
) -> Iterator[list[tuple[str, int, int]]]:
    """Yield, for each group, the parameters in a rank's partition.

    A parameter is its name, first element and number of elements.

    DeepSpeed 0.8 and newer save this list (`param_slice_mappings`). The list ignores the order of round_robin_gradients
    and may lack experts. Without a usable list, parameters follow one another as in `param_shapes`, each with its
    padding (`parameter_alignment`).
    """
    mappings = saved.get("param_slice_mappings")
    if mappings and not shuffled and not any(map(lacks_experts, mappings, map(Tensor.numel, _flat_weights(saved)))):
        for mapping in mappings:
            yield [(name, fragment.start, fragment.numel) for name, fragment in mapping.items()]
        return
    paddings = saved.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for flat, shapes, padding in zip(_flat_weights(saved), groups, paddings, strict=True):
        fragments, offset = [], 0
        for (name, shape), gap in zip(shapes.items(), padding, strict=True):
            rest = math.prod(shape) - done[name]
            if rest > 0 and offset < flat.numel():
                numel = min(rest, flat.numel() - offset)
                fragments.append((name, offset, numel))
                offset += numel + gap
        yield fragments


def _flat_weights(saved: dict[str, Any]) -> list[Tensor]:
    return saved.get("single_partition_of_fp32_groups") or saved["fp32_flat_groups"]


def _flat_locations(
    files: DeepSpeedFiles, file: str, saved: dict[str, Any], group: int, offset: int
) -> dict[str, Location]:
    """Return where a flat group's master weights and states of the same length are stored."""
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
    kinds = weight_states(states, length)
    padding = saved["group_paddings"][group] if saved.get("group_paddings") else 0  # saved with the states alone
    if longer := next((kind for kind in kinds if states[kind].numel() > length + padding), None):
        reason = f"{file} has {length} elements at {key}.{group}, but {states[longer].numel()} of {longer}"
        raise incomplete(files.folder, reason, MISSING)
    return where | {kind: files.at(file, [*keys, kind], offset) for kind in kinds}


def _global_name(local: str, dp: int, state: dict[str, Any]) -> str:
    """Return a parameter's name in the full model. Ranks number their own experts from 0."""
    match = EXPERTS.fullmatch(local)
    if match is None or not state.get("num_experts"):
        return local
    own_numbers = {int(m[2]) for group in flat_groups(state) for name in group if (m := EXPERTS.fullmatch(name))}
    count = max(own_numbers) + 1
    total = state["num_experts"]
    ranks = max(1, (total[0] if isinstance(total, list) else total) // count)  # the experts are split over these ranks
    return f"{match[1]}{dp % ranks * count + int(match[2])}{match[3]}"


def add_stage_three(files: DeepSpeedFiles, mp: int, parts: Parts) -> None:
    """Add the parameters of stage 3: each rank has an equal part of each, in sub-groups."""
    # Stage 3 splits every parameter over all ranks, not the flat group as a whole. A rank's flat tensor has its shares
    # one after another, cut into sub-groups of whole parameters.
    state = files.model(mp)[1]
    shapes = {name: tuple(shape) for group in flat_groups(state) for name, shape in group.items()}
    parts.ties |= state.get("shared_params") or {}
    if not any(rank == mp for rank, _ in files.optimizers):
        copies = _weights_copy(files, shapes, parts.ties)
        for name, shape in shapes.items():
            parts.add(mp, name, shape, 0, math.prod(shape), {MASTER: copies[name]})
        parts.notes.append("it has no optimizer states")
        _add_frozen_partitions(files, mp, [*range(int(state.get("dp_world_size") or 1))], parts)
        return
    ranks, lost = files.optimizer_ranks(mp), files.lost(mp)
    parts.lost += lost.values()
    copies = _weights_copy(files, shapes, parts.ties) if lost else {}
    known = next(name for (rank, _), name in files.optimizers.items() if rank == mp)
    for dp in ranks:
        file = files.optimizers.get((mp, dp), known)
        saved = files.load(file)["optimizer_state_dict"]
        group, offset, lengths = 0, 0, [flat.numel() for flat in saved["fp32_flat_groups"]]
        for name, shape in shapes.items():
            total = math.prod(shape)
            # The shares of the last ranks may be shorter or empty, but their places in the sub-group have full size.
            share = -(-total // len(ranks))
            # a sub-group has full shares; after its last share the next sub-group begins
            while offset + share > lengths[group]:
                if offset < lengths[group]:
                    raise incomplete(files.folder, f"{file}: a sub-group ends within {name}", MISSING)
                group, offset = group + 1, 0
            numel = min(share, total - dp * share)
            if numel > 0:
                where = _flat_locations(files, file, saved, group, offset)
                if dp in lost:
                    where = _replaced(replace(copies[name], offset=dp * share), where)
                parts.add(mp, name, shape, dp * share, numel, where)
            offset += share
    _add_frozen_partitions(files, mp, ranks, parts)


def _weights_copy(
    files: DeepSpeedFiles, shapes: dict[str, tuple[int, ...]], ties: dict[str, str]
) -> dict[str, Location]:
    """Return the places of the parameters in 16-bit weights next to the checkpoint.

    The Trainer, Accelerate, save_16bit_model and the setting stage3_gather_16bit_weights_on_model_save write these
    weights.
    """
    copies: dict[str, Location] = {}
    for file in weight_files(files.root):
        saved: dict[str, Tensor] = safe_load.load(file)
        for key, value in saved.items():
            name = ties.get(key, key)
            if tuple(value.shape) == shapes.get(name):
                copies.setdefault(name, Location(file=file.relative_to(files.root).as_posix(), keys=[key]))
    if absent := [name for name in shapes if name not in copies]:
        reason = f"an optimizer file is missing, and no other file contains the weights of {absent[0]}"
        raise incomplete(files.folder, reason, MISSING)
    return copies


def _add_frozen_partitions(files: DeepSpeedFiles, mp: int, ranks: list[int], parts: Parts) -> None:
    """Add stage 3's frozen weights and buffers, from the model states of all ranks."""
    for dp in ranks:
        if (mp, dp) not in files.models:
            missing = f"zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt"
            if files.model(mp)[1].get("frozen_param_shapes") or (mp, dp) in files.optimizers:
                raise incomplete(files.folder, f"{missing} is missing", MISSING)
            continue
        name = files.models[mp, dp]
        state = files.load(name)
        for frozen, shape in (state.get("frozen_param_shapes") or {}).items():
            total, share = math.prod(shape), -(-math.prod(shape) // len(ranks))
            numel = min(share, total - dp * share)
            if numel > 0 and frozen not in parts.ties:
                where = {MASTER: files.at(name, ["frozen_param_fragments", frozen])}
                parts.add(mp, frozen, tuple(shape), dp * share, numel, where)
        # the first rank's buffers count, as in DeepSpeed's zero_to_fp32.py
        for buffer in state.get("buffer_names") or []:
            if buffer in state["module"]:
                parts.buffers.setdefault(buffer, SavedBuffer(buffer, files.at(name, []).file, ["module", buffer]))
