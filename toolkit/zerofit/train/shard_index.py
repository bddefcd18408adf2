"""Index a checkpoint's files: which part of the full model each file has, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod

import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import nn

from zerofit.checkpoint.index import TensorSlice, scaler_numbers
from zerofit.spec.mesh import RankCoords, expert_rank
from zerofit.spec.run_folder import Layout
from zerofit.train.tensor_split import share_of, slice_of
from zerofit.train.trainer import EngineTrainer, persistent_buffers
from zerofit.train.zero_layouts import (
    Engine,
    ParamShard,
    Unsupported,
    frozen_shards,
    inner_optimizer,
    local_shards,
    loss_scaler,
    states_of,
)

# ranks/rank-R.json lists each stretch that rank R saved and no lower rank has:
#
#     name, shape    of the tensor in the full model
#     cut            this rank's slice of it, for tensor and expert parallelism; null: the full tensor
#     start, numel   of the stretch in the flattened slice
#     where          for each kind ("fp32", "exp_avg", ...) the file, the keys into it, and the offset there


@dataclass(frozen=True)
class IndexedShard:
    """A part of one parameter that this rank has, with its name and shape in the full model."""

    name: str  # in the full model
    shape: tuple[int, ...]  # of the tensor in the full model
    cut: TensorSlice | None  # this rank's part of the parameter
    shard: ParamShard
    first: bool  # no lower rank holds the same stretch


def build_index(trainer: EngineTrainer) -> dict[str, object]:
    """Return an index of the files that this rank's engines save, as JSON.

    `checkpoint.full_state` reads it.
    """
    engines = {tag: _engine_index(trainer, engine, tag) for tag, engine in trainer.engines().items()}
    return {"world_size": dist.get_world_size(), "engines": engines}


def indexed_shards(trainer: EngineTrainer, engine: Engine, tag: str) -> Iterator[IndexedShard]:
    """Yield this rank's shards of an engine for a checkpoint.

    Weights that the run freezes are left out. Weights that the user's model code freezes are included. Raises
    Unsupported if the shards cannot be located.
    """
    shards = local_shards(engine, tag, frozen=trainer.job.run.partial is None)
    yield from _named(trainer, engine, (shard for shard in shards if shard.numel))  # without shards of padding only


def indexed_frozen(trainer: EngineTrainer, engine: Engine, tag: str) -> Iterator[IndexedShard]:
    """Yield this rank's shards of weights that the run freezes, including empty ones."""
    yield from _named(trainer, engine, frozen_shards(engine, tag))


def _named(trainer: EngineTrainer, engine: Engine, shards: Iterable[ParamShard]) -> Iterator[IndexedShard]:
    names = trainer.state_names(engine).parameters
    for shard in shards:
        shape, cut = _full_shape(shard.parameter, trainer.coords, trainer.job.layout)
        first = _is_first(trainer, shard, cut)
        yield IndexedShard(names[id(shard.parameter)], shape, cut, shard, first)


def _engine_index(trainer: EngineTrainer, engine: Engine, tag: str) -> dict[str, object]:
    names, own_file = trainer.state_names(engine), f"ranks/rank-{dist.get_rank():05}.pt"
    if trainer.job.run.partial:
        # Frozen weights are not saved, so the index must not promise them.
        names = names.only({id(p) for p in engine.module.parameters() if p.requires_grad})
    index = {
        "unsupported": None,
        "names": list(dict.fromkeys(names.ties.get(name, name) for name in names.parameters.values())),
        "parameters": [],
        "buffers": [
            {"name": names.buffers[id(buffer)], "file": own_file, "keys": ["buffers", own]}
            for own, buffer in dict(persistent_buffers(trainer.module)).items()
            if id(buffer) in names.buffers
        ],
        "ties": names.ties,
        "counters": _counters(engine),
    }
    try:
        index["parameters"] = [
            _entry(indexed, states_of(engine, indexed.shard.master))
            for indexed in indexed_shards(trainer, engine, tag)
            if indexed.first
        ]
    except Unsupported as reason:
        index["unsupported"] = str(reason)
    return index


def _entry(indexed: IndexedShard, states: dict[str, object]) -> dict[str, object]:
    shard, where = indexed.shard, {}
    for kind, slot in shard.slots(states).items():
        file, keys = slot.at
        # a slot may begin before the stretch: Muon's momentum covers the full parameter
        where[kind] = {"file": file, "keys": list(keys), "offset": slot.offset + shard.start - slot.start}
        if not keys:  # a file of raw numbers does not contain their type
            where[kind]["raw"] = str(slot.tensor.dtype).removeprefix("torch.")
    return {
        "name": indexed.name,
        "shape": list(indexed.shape),
        "cut": indexed.cut and asdict(indexed.cut),
        "start": shard.start,
        "numel": shard.numel,
        "where": where,
    }


def _full_shape(p: nn.Parameter, coords: RankCoords, layout: Layout) -> tuple[tuple[int, ...], TensorSlice | None]:
    """Return a parameter's shape in the full model, and this rank's part of the parameter."""
    local, experts = tuple(getattr(p, "ds_shape", p.shape)), share_of(p)
    if experts is not None:
        return experts.shape, experts.cut(expert_rank(coords.rank, layout))
    try:
        cut = slice_of(p, coords.tp_rank)
    except ValueError as reason:
        raise Unsupported(str(reason)) from None
    if cut is None:
        return local, None
    shape = tuple(getattr(p, DS_AUTOTP_UC_META)["logical_shape"])
    if prod(cut.shape(shape)) != prod(local):
        reason = f"this rank's part of a weight of shape {shape} has shape {local}, but DeepSpeed recorded {cut}"
        raise Unsupported(f"tensor parallelism: {reason}")
    return shape, cut


def _is_first(trainer: EngineTrainer, shard: ParamShard, cut: TensorSlice | None) -> bool:
    """Return whether this rank is the first that has this part of the parameter."""
    coords = trainer.coords
    if getattr(shard.parameter, "ds_pipe_replicated", False):
        return False  # a tied weight that an earlier stage also has
    if shard.replicated and (coords.dp_rank or coords.sp_rank):
        return False
    if cut is not None or coords.tp_rank == 0:
        return True
    # before groups existed, transformers partitioned parameters without a cut over all ranks
    group = getattr(shard.parameter, "ds_process_group", None)
    return group is not None and dist.get_world_size(group) == dist.get_world_size()


def _counters(engine: Engine) -> dict[str, object]:
    steps = [int(s["step"]) for s in inner_optimizer(engine).state.values() if "step" in s]
    schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else {}
    scaler = loss_scaler(engine)
    return {
        "step": max(steps, default=None),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "lr_scheduler": {k: v for k, v in schedule.items() if type(v) in (int, float)},
        "loss_scaler": scaler and scaler_numbers(scaler),
    }
