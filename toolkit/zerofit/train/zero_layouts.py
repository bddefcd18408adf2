"""How each of DeepSpeed's optimizers lays out master weights and states, in memory and in its files.

Read in the source of DeepSpeed 0.19.8; nothing else here knows these attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofit.checkpoint.full_state import MASTER
from zerofit.train.param_shards import Address, ParamShard, Unsupported
from zerofit.train.zero3_layout import frozen_part, partitioned, to_16_bit


def inner_optimizer(engine: Any) -> Any:
    """The optimizer that steps, inside DeepSpeed's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def held(engine: Any, tag: str) -> list[ParamShard]:
    """All that this rank holds; `tag` is the folder of the engine's files. Raises Unsupported where that is unknown."""
    kind = type(engine.optimizer).__name__
    if engine.zenflow or (kind not in LAYOUTS and hasattr(engine.optimizer, "optimizer")):
        raise Unsupported(f"{kind} keeps part of its state in a way of its own")
    if engine.has_moe_layers:
        raise Unsupported("under DeepSpeed's own expert parallelism each rank has files of its own for its experts")
    return [*LAYOUTS.get(kind, _plain)(engine, tag), *_frozen(engine, tag)]


@torch.no_grad()
def to_training_precision(engine: Any) -> None:
    """Give the module the weights that its optimizer's masters now hold, as loading a checkpoint does."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()  # of this rank's partition, then all ranks' are gathered
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        to_16_bit(optimizer)
    elif hasattr(optimizer, "fp16_groups"):
        for one in LAYOUTS[type(optimizer).__name__](engine, ""):
            one.parameter.data.copy_(one.slots({})[MASTER].live.view(one.parameter.shape))


def _plain(engine: Any, tag: str) -> Iterator[ParamShard]:
    """No ZeRO, fp32: torch's optimizer on the module's own parameters."""
    module, states, index = _module_addresses(engine, tag), engine._get_ckpt_name("", tag), count()
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            states_at = (states, ("optimizer", "state", next(index)))
            yield _alone(p, p, module[id(p)], states_at)


def _unfused(engine: Any, tag: str) -> Iterator[ParamShard]:
    """No ZeRO, bf16 or fp16: a float32 copy of each parameter."""
    optimizer, states, index = engine.optimizer, engine._get_ckpt_name("", tag), count()
    for i, (group, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for j, (p, master) in enumerate(zip(group, masters, strict=True)):
            states_at = (states, ("optimizer", "optimizer_state_dict", "state", next(index)))
            yield _alone(p, master, (states, ("optimizer", "fp32_groups", i, j)), states_at)


def _fused(engine: Any, tag: str) -> Iterator[ParamShard]:
    """No ZeRO, bf16 or fp16 with FusedAdam: one flat float32 copy of each group."""
    optimizer, file = engine.optimizer, engine._get_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        at = (file, ("optimizer", "fp32_groups_flat", i))
        states_at = (file, ("optimizer", "optimizer_state_dict", "state", i))
        yield from _stretches(group, _packed(group), master, 0, at, states_at, replicated=True)


def _zero12(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Stages 1 and 2: each group flat, cut into equal partitions; round_robin_gradients orders it anew."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    for i, group in enumerate(optimizer.round_robin_bit16_groups):
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * optimizer.partition_size[i]
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states = ("base_optimizer_state", i) if optimizer.elastic_checkpoint else ("base_optimizer_state", "state", i)
        yield from _stretches(
            group,
            optimizer.round_robin_bit16_offsets[i],
            optimizer.single_partition_of_fp32_groups[i],
            first,
            at,
            (file, ("optimizer_state_dict", *states)),
            muon=optimizer.optimizer.param_groups[i].get("use_muon", False) and not optimizer.cpu_offload,
        )


def _bf16(engine: Any, tag: str) -> Iterator[ParamShard]:
    """A bf16 pipeline at stage 1 or below: like stage 1."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)):
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * master.numel()
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states_at = (file, ("optimizer_state_dict", "base_optimizer_state", "state", i))
        yield from _stretches(group, _packed(group), master, first, at, states_at)


LAYOUTS = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _zero12,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": partitioned,
}


def _frozen(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Parameters that are not trained, in training precision."""
    found = [p for p in engine.module.parameters() if not p.requires_grad and p.numel() + getattr(p, "ds_numel", 0)]
    module = _module_addresses(engine, tag) if found else {}
    for p in found:
        yield frozen_part(engine, p, tag) if hasattr(p, "ds_tensor") else _alone(p, p, module[id(p)], None)


def _alone(parameter: nn.Parameter, master: Tensor, master_at: Address, states_at: Address | None) -> ParamShard:
    """A whole parameter whose master is no part of a larger tensor, the same on every data parallel rank."""
    return ParamShard(
        parameter=parameter,
        master=master,
        offset=0,
        start=0,
        numel=parameter.numel(),
        master_at=master_at,
        states_at=states_at,
        replicated=True,
    )


def _stretches(
    group: list[nn.Parameter],
    offsets: list[int],
    master: Tensor,
    first: int,
    master_at: Address,
    states_at: Address,
    replicated: bool = False,
    muon: bool = False,
) -> Iterator[ParamShard]:
    """What of a flat group lies in `master`, its partition from element `first` on."""
    last = first + master.numel()
    inside = [(p, o) for p, o in zip(group, offsets, strict=True) if o < last and o + p.numel() > first]
    *before, total = _packed([p for p, _ in inside], end=True)
    for (p, offset), whole_offset in zip(inside, before, strict=True):
        start, end = max(offset, first), min(offset + p.numel(), last)
        yield ParamShard(
            parameter=p,
            master=master,
            offset=start - first,
            start=start - offset,
            numel=end - start,
            master_at=master_at,
            states_at=states_at,
            replicated=replicated,
            uncut=(whole_offset, total) if muon else None,
        )


def _packed(group: list[nn.Parameter], end: bool = False) -> list[int]:
    """Offsets of parameters that lie one after the other, and where the last one ends."""
    offsets = [0, *accumulate(p.numel() for p in group)]
    return offsets if end else offsets[:-1]


def _module_addresses(engine: Any, tag: str) -> dict[int, Address]:
    """Where the module's own weights are written, by id of the tensor."""
    module = engine.module
    if not hasattr(module, "ckpt_layer_path"):
        file = engine._get_ckpt_name("", tag)
        return {id(t): (file, ("module", name)) for name, t in module.state_dict(keep_vars=True).items()}
    layers = [(i, layer) for i, layer in enumerate(module.forward_funcs) if isinstance(layer, nn.Module)]
    return {
        id(t): (module.ckpt_layer_path(tag, i), (name,))
        for i, layer in layers
        for name, t in layer.state_dict(keep_vars=True).items()
    }
