"""Which pieces of which parameters of the whole model this rank holds, and where a checkpoint's files have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import groups
from torch import Tensor, nn

from zerofit.checkpoint.full_state import TensorParallelSlice
from zerofit.train.loop import EngineTrainer
from zerofit.train.param_shards import ParamShard, StateSlot, Unsupported
from zerofit.train.zero_layouts import held, inner_optimizer

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # what a dynamic loss scaler remembers


@dataclass(frozen=True)
class IndexedShard:
    """A stretch of one parameter that this rank holds."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole model's tensor
    cut: TensorParallelSlice | None  # this tensor parallel rank's share of it
    held: ParamShard
    first: bool  # whether no lower rank holds the same


@dataclass
class ModelNames:
    """What the parameters and buffers of an engine's module are called in the whole model."""

    parameters: dict[int, str] = field(default_factory=dict)  # by id, in the order of the model
    ties: dict[str, str] = field(default_factory=dict)  # other names of the same tensor
    buffers: dict[int, str] = field(default_factory=dict)  # by id


def engines(driver: EngineTrainer) -> dict[str, Any]:
    """The driver's DeepSpeed engines by the folder of their files."""
    second = getattr(driver, "generator", None)
    return {"state": driver.engine} | ({} if second is None else {"generator": second})


def describe(driver: EngineTrainer) -> dict[str, Any]:
    """This rank's index of the files that `engine.save_checkpoint` writes, as JSON (see `checkpoint.full_state`)."""
    found = {tag: _describe(driver, engine, tag) for tag, engine in engines(driver).items()}
    return {"world_size": dist.get_world_size(), "engines": found}


def pieces(driver: EngineTrainer, engine: Any, tag: str) -> Iterator[IndexedShard]:
    """All pieces of one engine on this rank. Raises Unsupported where they cannot be found."""
    names = names_of(driver, engine).parameters
    for one in held(engine, tag):
        if one.numel == 0:
            continue  # only padding
        shape, cut = _whole_shape(one.parameter)
        first = _is_first(driver, one, cut)
        yield IndexedShard(names[id(one.parameter)], shape, cut, one, first)


def names_of(driver: EngineTrainer, engine: Any) -> ModelNames:
    """Names in the whole model."""
    return _stage_names(driver) if hasattr(driver, "layers") else _module_names(engine.module)


def _describe(driver: EngineTrainer, engine: Any, tag: str) -> dict[str, Any]:
    names = names_of(driver, engine)
    index = {
        "unsupported": None,
        "names": list(dict.fromkeys(names.ties.get(name, name) for name in names.parameters.values())),
        "parameters": [],
        "buffers": _saved_buffers(driver, names),
        "ties": names.ties,
        "counters": _counters(engine),
    }
    try:
        index["parameters"] = [_entry(engine, piece) for piece in pieces(driver, engine, tag) if piece.first]
    except Unsupported as reason:
        index["unsupported"] = str(reason)
    return index


def _entry(engine: Any, piece: IndexedShard) -> dict[str, Any]:
    one = piece.held
    slots = one.slots(inner_optimizer(engine).state.get(one.master, {}))
    return {
        "name": piece.name,
        "shape": list(piece.shape),
        "cut": piece.cut and {"dim": piece.cut.dim, "ranges": [list(r) for r in piece.cut.ranges]},
        "start": one.start,
        "numel": one.numel,
        "where": {kind: _where(slot, one) for kind, slot in slots.items()},
    }


def _where(slot: StateSlot, one: ParamShard) -> dict[str, Any]:
    file, keys = slot.at
    where = {"file": file, "keys": list(keys), "offset": slot.offset + one.start - slot.start}
    return where if keys else where | {"raw": str(slot.tensor.dtype).removeprefix("torch.")}


def _whole_shape(p: nn.Parameter) -> tuple[tuple[int, ...], TensorParallelSlice | None]:
    """Shape in the whole model, and what of it this tensor parallel rank has."""
    local = tuple(getattr(p, "ds_shape", p.shape))
    meta = getattr(p, DS_AUTOTP_UC_META, None)
    if not meta or meta["replicated"]:
        return local, None
    shape, dim, rank = tuple(meta["logical_shape"]), meta["partition_dim"], groups.get_tensor_model_parallel_rank()
    parts = meta["sub_param_shard_widths"] or [meta["partition_sizes"]]
    if dim is None or parts == [None]:
        raise Unsupported("DeepSpeed does not say how it cut a weight for tensor parallelism")
    ranges, offset = [], 0
    for widths in parts:
        ranges.append((offset + sum(widths[:rank]), widths[rank]))
        offset += sum(widths)
    cut = TensorParallelSlice(dim, tuple(ranges))
    if prod(cut.shape(shape)) != prod(local) or offset != shape[dim]:
        raise Unsupported(f"a weight of shape {shape} was cut into {local} for tensor parallelism, not into {ranges}")
    return shape, cut


def _is_first(driver: EngineTrainer, one: ParamShard, cut: TensorParallelSlice | None) -> bool:
    """Whether no lower rank holds the same stretch of the same parameter."""
    place, tp = driver.place, driver.job.layout.tp
    if getattr(one.parameter, "ds_pipe_replicated", False):
        return False  # a tied weight, which an earlier stage has too
    if one.replicated and (place.dp_rank or place.sp_rank):
        return False
    if tp == 1 or cut is not None or place.rank % tp == 0:
        return True
    # what tensor parallelism leaves whole, transformers has partitioned over all ranks before there were groups
    group = getattr(one.parameter, "ds_process_group", None)
    return group is not None and dist.get_world_size(group) == dist.get_world_size()


def _module_names(module: nn.Module) -> ModelNames:
    names = ModelNames(buffers={id(buffer): name.lstrip(".") for name, buffer in persistent_buffers(module)})
    for name, p in module.named_parameters(remove_duplicate=False):
        if 0 not in getattr(p, "ds_shape", p.shape) and names.parameters.setdefault(id(p), name) != name:
            names.ties[name] = names.parameters[id(p)]
    return names


def _stage_names(driver: Any) -> ModelNames:
    """Of a pipeline stage. A weight that several layers share has the name that the first of them gives it."""
    names, firsts = ModelNames(), {}
    for layer in driver.layers:
        if layer.tied:
            own = layer.names[layer.tied_attr]
            if firsts.setdefault(layer.tied, own) != own:
                names.ties[own] = firsts[layer.tied]
    stage = driver.place.pp_rank
    start, end = driver.bounds[stage], driver.bounds[stage + 1]
    for layer in driver.layers[start:end]:
        for key, tensor in layer.module.state_dict(keep_vars=True).items():
            name = names.ties.get(layer.names[key], layer.names[key])
            if not isinstance(tensor, nn.Parameter):
                names.buffers[id(tensor)] = name
            elif names.parameters.setdefault(id(tensor), name) != name:
                names.ties[name] = names.parameters[id(tensor)]
    return names


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the model's state, under the names that `rank_state` saves them by."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _saved_buffers(driver: EngineTrainer, names: ModelNames) -> list[dict[str, Any]]:
    file, found = f"ranks/rank-{dist.get_rank():05}.pt", dict(persistent_buffers(driver.module))
    return [
        {"name": names.buffers[id(buffer)], "file": file, "keys": ["buffers", own]}
        for own, buffer in found.items()
        if id(buffer) in names.buffers
    ]


def _counters(engine: Any) -> dict[str, Any]:
    """What is one number a run."""
    steps = [int(s["step"]) for s in inner_optimizer(engine).state.values() if "step" in s]
    schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else {}
    scaler = loss_scaler(engine)
    return {
        "step": max(steps, default=None),
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "global_samples": engine.global_samples,
        "lr_scheduler": {k: v for k, v in schedule.items() if type(v) in (int, float)},
        "loss_scaler": scaler and {k: getattr(scaler, k) for k in SCALER if hasattr(scaler, k)},
    }


def loss_scaler(engine: Any) -> Any | None:
    """fp16's dynamic loss scaler, wherever this stage has it; None where there is none."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    return scaler if dynamic else None
