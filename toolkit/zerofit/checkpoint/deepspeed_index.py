"""The index of a checkpoint that a DeepSpeed engine wrote, from metadata in its files.

Weights of tensor parallel ranks are joined by rules in the files, or by Megatron's rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from zerofit.checkpoint.deepspeed_files import EXPERTS, DeepSpeedFiles, Keys, Parts, step_count
from zerofit.checkpoint.deepspeed_partitions import add_flat_groups, add_stage_three, partitioned_groups
from zerofit.checkpoint.foreign import Foreign
from zerofit.checkpoint.index import (
    MASTER,
    EngineIndex,
    Location,
    ParameterGroup,
    RankIndex,
    SavedBuffer,
    Shard,
    TensorSlice,
    scaler_numbers,
)
from zerofit.checkpoint.optimizer_names import flat_names, state_names, weight_states
from zerofit.checkpoint.store import STATE
from zerofit.spec.errors import Problem, UserError

# Names of Megatron-DeepSpeed (megatron/model: language_model.py, transformer.py, bert_model.py, gpt_model.py) and
# GPT-NeoX, for their checkpoints without rules. A pipeline numbers its layers; its last norm is NUMBER.weight.
MEGATRON = {
    "parameter_with_row_parallelism_patterns": [r".*attention\.dense\.weight", r".*\.dense_4h_to_h\.weight"],
    "tp_replicated_parameter_patterns": [
        r".*norm.*\.(weight|bias)",
        r"\d+\.(weight|bias)",
        r".*(position|tokentype)_embeddings\.weight",
        r".*(attention\.dense|\.dense_4h_to_h)\.bias",
        r".*(pooler\.dense|lm_head\.dense|binary_head)\.(weight|bias)",
        r".*\.gate\.wg\.weight",
    ],
    "columns": [
        r".*\.(query_key_value|query|key_value|dense_h_to_4h)\.(weight|bias)",
        r".*(word_embeddings|output_layer|final_linear|lm_head)\.weight",
        r".*lm_head\.bias",
    ],
}
MARK = re.compile(r".*\.(query_key_value|dense_h_to_4h)\.weight")
WIDE, NARROW = "dense_h_to_4h.weight", "dense_4h_to_h.weight"


def deepspeed_index(found: Foreign) -> RankIndex:
    """Build the index.

    Raises UserError "incomplete-checkpoint", "no-whole-view", "damaged-file", "unsafe-file".
    """
    files = DeepSpeedFiles.of(found)
    parts = Parts(tensor_ranks=files.tensor_ranks)
    # Tensors are added in the order of their precision, because the first source of a parameter counts. The optimizer's
    # files have master weights in float32. The model's files add what the optimizer's files lack.
    for mp in files.model_ranks:
        if found.stage_three:
            add_stage_three(files, mp, parts)
        elif any(rank == mp for rank, _ in files.optimizers):
            add_flat_groups(files, mp, parts)
    for tp in range(files.tensor_ranks):
        weights = _saved_weights(files, tp)
        if not files.optimizers and not found.stage_three:
            _add_unpartitioned(files, tp, weights, parts)
        if not found.stage_three:
            _add_stateless(files, tp, weights, parts)
    _, state = files.model(files.model_ranks[0])
    # The module's state dict has the model's order. The optimizer's groups may have another order.
    listed = dict.fromkeys(state.get("module") or ()) | dict.fromkeys(parts.shards)
    engine = EngineIndex(
        names=[name for name in listed if name in parts.shards],
        parameters=whole_shards(found, parts, state.get("universal_checkpoint_info")),
        buffers=list(parts.buffers.values()),
        ties=parts.ties,
        counters=_counters(files, state),
        unsupported=None,
        notes=parts.notes,
        lost=parts.lost,
        groups=parts.groups or partitioned_groups(files, found.stage_three),
    )
    world = int(state.get("dp_world_size") or 1) * len(files.model_ranks)
    return RankIndex(world_size=world, engines={STATE: engine})


SavedWeights = dict[str, tuple[str, Keys, Tensor]]  # by name: file, keys, tensor


def _saved_weights(files: DeepSpeedFiles, tp: int) -> SavedWeights:
    """Return the weights that a tensor parallel rank saved one by one, not in flat partitions."""
    weights: SavedWeights = {}
    for (number, rank), name in sorted(files.layers.items()):
        if rank == tp:
            # A PipelineModule names its layers by their number, and each file has the names within one layer.
            weights |= {f"{number}.{key}": (name, [key], value) for key, value in files.load(name).items()}
    # Tensor parallel ranks are neighbors, so the ranks of one tensor rank in all stages are `tensor_ranks` apart.
    for mp in files.model_ranks[tp :: files.tensor_ranks]:
        name, state = files.model(mp)
        weights |= {key: (name, ["module", key], value) for key, value in (state.get("module") or {}).items()}
    for name in files.experts:
        weights |= {key: (name, [key], value) for key, value in files.load(name).items()}
    return {name: entry for name, entry in weights.items() if isinstance(entry[2], Tensor) and entry[2].numel()}


def _add_stateless(files: DeepSpeedFiles, tp: int, weights: SavedWeights, parts: Parts) -> None:
    """Add tensors without optimizer states: frozen weights, buffers, names of tied weights."""
    buffers = _buffers(files)
    for name, (file, keys, value) in weights.items():
        if tp in parts.shards.get(name, ()) or name in parts.ties:
            continue
        where = files.at(file, keys)
        if name in buffers or not value.is_floating_point():
            parts.buffers.setdefault(name, SavedBuffer(name, where.file, keys))
        else:
            parts.add(tp, name, tuple(value.shape), 0, value.numel(), {MASTER: where})


def _buffers(files: DeepSpeedFiles) -> set[str]:
    return {name for mp in files.model_ranks for name in files.model(mp)[1].get("buffer_names") or []}


# The optimizer numbers parameters in the order of its groups.
def _add_unpartitioned(files: DeepSpeedFiles, tp: int, weights: SavedWeights, parts: Parts) -> None:
    """Add the parameters of stage 0."""
    buffers = _buffers(files)
    storages: dict[tuple[int, int], str] = {}  # names of tensors with the same data
    for name, (_, _, value) in weights.items():
        first = storages.setdefault((value.untyped_storage().data_ptr(), int(value.storage_offset())), name)
        if first != name and tuple(value.shape) == tuple(weights[first][2].shape):
            parts.ties[name] = first
    shapes = {n: tuple(v.shape) for n, (_, _, v) in weights.items() if n not in buffers and n not in parts.ties}
    ranks = files.model_ranks[tp :: files.tensor_ranks]
    done = 0
    for key, file in (files.expert_optimizers or {(mp, 0): files.model(mp)[0] for mp in ranks}).items():
        saved = files.load(file).get("optimizer")
        if not saved:
            continue
        # DeepSpeed's optimizers for 16 bits wrap torch's state dict, next to the master weights.
        base, flats = saved.get("optimizer_state_dict", saved), saved.get("fp32_groups_flat")
        local = _experts_of(shapes, files, key)
        if files.layers:  # a stage of a pipeline has the next layers
            # The weights were collected in the order of the layers, so the stages' parameters follow one another.
            rest = list(shapes.items())[done:]
            count = sum(len(group["params"]) for group in base["param_groups"])
            if flats:
                ends = [*accumulate(math.prod(shape) for _, shape in rest)]
                count = ends.index(sum(flat.numel() for flat in flats)) + 1
            local, done = dict(rest[:count]), done + count
        groups = flat_names(flats, local) if flats else state_names(base, local, saved.get("fp32_groups"))
        if groups is None:
            parts.notes.append(f"the optimizer's states in {file} cannot be matched with the parameters' names")
            continue
        for number, (named, entry) in enumerate(zip(groups, base["param_groups"], strict=True)):
            settings = {key: value for key, value in entry.items() if key != "params"}
            if tp == 0:
                parts.groups.append(ParameterGroup([name for _, name in named], settings))
            for name, where in _unpartitioned_places(files, file, saved, number, named, weights):
                if tp not in parts.shards.get(name, ()):
                    parts.add(tp, name, shapes[name], 0, math.prod(shapes[name]), where)


def _unpartitioned_places(
    files: DeepSpeedFiles,
    file: str,
    saved: dict[str, Any],
    group: int,
    named: list[tuple[int, str]],
    weights: SavedWeights,
) -> Iterator[tuple[str, dict[str, Location]]]:
    """Yield the parameters of a group and their places.

    Parameters are saved one by one or, by DeepSpeed's FP16_Optimizer, in flat tensors.
    """
    is_flat, offset = "fp32_groups_flat" in saved, 0
    inner: Keys = ["optimizer", "optimizer_state_dict"] if "optimizer_state_dict" in saved else ["optimizer"]
    base = saved.get("optimizer_state_dict", saved)
    for number, (index, name) in enumerate(named):
        weights_file, keys, value = weights[name]
        where = {MASTER: files.at(weights_file, keys)}
        if "fp32_groups" in saved:
            where[MASTER] = files.at(file, ["optimizer", "fp32_groups", group, number])
        elif is_flat:
            where[MASTER] = files.at(file, ["optimizer", "fp32_groups_flat", group], offset)
        for kind in weight_states(base["state"].get(index, {}), value.numel()):
            where[kind] = files.at(file, [*inner, "state", index, kind], offset if is_flat else 0)
        yield name, where
        offset += value.numel()


def _experts_of(
    shapes: dict[str, tuple[int, ...]], files: DeepSpeedFiles, key: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return a rank's parameters in a mixture: the shared ones, and those of its experts."""
    numbers = {name: int(match[2]) for name in shapes if (match := EXPERTS.fullmatch(name))}
    if not files.expert_optimizers or not numbers:
        return shapes
    each = (1 + max(numbers.values())) // len({expert_rank for _, expert_rank in files.expert_optimizers}) or 1
    return {name: s for name, s in shapes.items() if name not in numbers or numbers[name] // each == key[1]}


def _counters(files: DeepSpeedFiles, state: dict[str, Any]) -> dict[str, Any]:
    file = next(iter(files.optimizers.values()), None)
    saved = files.load(file)["optimizer_state_dict"] if file else (state.get("optimizer") or {})
    # the new run has its own schedule; only the position is taken from the file
    schedule = state.get("lr_scheduler") or {"last_epoch": int(state.get("global_steps") or 0)}
    return {
        "step": step_count(saved),
        "global_steps": int(state.get("global_steps") or 0),
        "skipped_steps": int(state.get("skipped_steps") or 0),
        "global_samples": int(state.get("global_samples") or 0),
        # torch's schedulers also save flags, and for isinstance a bool is an int. So the types are compared.
        "lr_scheduler": {k: v for k, v in schedule.items() if type(v) in (int, float)},
        "schedule": state.get("lr_scheduler"),
        "loss_scaler": scaler_numbers(saved.get("loss_scaler") or saved),  # without ZeRO they are in the state itself
    }


def whole_shards(found: Foreign, parts: Parts, rules: dict[str, Any] | None) -> list[Shard]:
    """Return shards as parts of full tensors. Raises UserError "no-whole-view" without rules."""
    if parts.tensor_ranks == 1:
        return [shard for ranks in parts.shards.values() for shard in ranks[0]]
    unknown = []
    if not rules and any(MARK.fullmatch(name) for name in parts.shards):
        unknown = [name for name in parts.shards if not any(_Rules.matches(each, name) for each in MEGATRON.values())]
        rules = MEGATRON | {"parameter_with_2_sub_params_cat_dim_0": _gated(parts)}
    if not rules or unknown:
        what = unknown[0] if unknown else "them"
        message = f"{found.files} is split over {parts.tensor_ranks} tensor parallel ranks"
        message += f", without rules to join {what}"
        hint = "gather it with the program that wrote it, e.g. save_16bit_model; DeepSpeed saves these rules since 0.19"
        raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where=str(found.files)))
    shares = _Rules(rules)
    return [shard for name, ranks in parts.shards.items() for shard in _joined(found, shares, name, ranks)]


# These stack two matrices, so they have twice the rows.
def _gated(parts: Parts) -> list[str]:
    """Return patterns for Megatron's gated layers."""
    gated = []
    for name, ranks in parts.shards.items():
        other = parts.shards.get(name.replace(WIDE, NARROW))
        if name.endswith(WIDE) and other and ranks[0][0].shape[0] == 2 * other[0][0].shape[-1]:
            gated.append(re.escape(name.removesuffix("weight")) + "(weight|bias)")
    return gated


@dataclass(frozen=True)
class _Rules:
    """DeepSpeed's `universal_checkpoint_info` (deepspeed/checkpoint/constants.py)."""

    saved: dict[str, Any]

    def has(self, key: str, name: str) -> bool:
        return self.matches(self.saved.get(key) or (), name)

    @staticmethod
    def matches(patterns: Iterable[str], name: str) -> bool:
        try:
            return any(re.match(pattern, name) for pattern in patterns)
        except re.error as error:
            raise ValueError(f"a pattern of tensor parallel shares: {error}") from None

    def widths(self, name: str, lengths: list[int]) -> list[list[int]] | None:
        """Return each rank's rows in each of a weight's stacked matrices; None for one matrix."""
        # The most exact description comes first: widths of each rank, then two equal halves, then equal parts of any
        # number.
        for pattern, widths in (self.saved.get("sub_param_shard_widths") or {}).items():
            if self.matches([pattern], name):
                return [list(each) for each in widths]
        if self.has("parameter_with_2_sub_params_cat_dim_0", name):
            return [[length // 2 for length in lengths]] * 2
        for entry in self.saved.get("parameter_with_sub_params") or ():
            if self.matches(entry["patterns"], name):
                sizes = entry["shape"][entry["partition_dim"]]
                if not isinstance(sizes, list | tuple):
                    raise ValueError(f"the matrices in {name} have no sizes")
                return [[size // len(lengths)] * len(lengths) for size in sizes]
        return None

    def dim(self, name: str) -> int:
        for entry in self.saved.get("parameter_with_sub_params") or ():
            if self.matches(entry["patterns"], name):
                return int(entry["partition_dim"])
        return int(self.has("parameter_with_row_parallelism_patterns", name))


def _joined(found: Foreign, rules: _Rules, name: str, ranks: dict[int, list[Shard]]) -> list[Shard]:
    """Return the shards of a parameter as parts of the full tensor.

    If all ranks have the full parameter, return only the first rank's shards.
    """
    for pattern, reason in (rules.saved.get("autotp_unsupported_parameter_patterns") or {}).items():
        if rules.matches([pattern], name):
            message = f"{found.files}: the shares of {name} cannot be joined: {reason}"
            raise UserError(Problem(kind="no-whole-view", message=message, where=str(found.files)))
    same = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
    if len(ranks) == 1 or any(rules.has(key, name) for key in same):
        return ranks[min(ranks)]
    shapes = [shards[0].shape for _, shards in sorted(ranks.items())]
    # A vector has only dimension 0, even if a pattern for row parallelism matches its name.
    dim = rules.dim(name) if len(shapes[0]) > 1 else 0
    lengths = [shape[dim] for shape in shapes]
    widths = rules.widths(name, lengths) or [lengths]
    full = (*shapes[0][:dim], sum(map(sum, widths)), *shapes[0][dim + 1 :])
    starts = [0, *accumulate(sum(each) for each in widths)]
    shards = []
    for number, (_, own) in enumerate(sorted(ranks.items())):
        ranges = [(start + sum(each[:number]), each[number]) for start, each in zip(starts, widths, strict=False)]
        cut = TensorSlice(dim, tuple(span for span in ranges if span[1]))
        if math.prod(cut.shape(full)) != math.prod(own[0].shape):
            raise ValueError(f"the share of {name} on tensor parallel rank {number} has the shape {own[0].shape}")
        shards += [replace(shard, shape=full, cut=cut) for shard in own]
    return shards
