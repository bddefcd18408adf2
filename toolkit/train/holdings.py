"""How each of DeepSpeed's optimizers lays out master weights and states, in memory and in its files.

Read in the source of DeepSpeed 0.19.8; nothing else here knows these attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from torch import Tensor, nn

from zerofit.checkpoint.reader import MASTER

Address = tuple[str, tuple[Any, ...]]  # a file, by its path in the checkpoint, and the keys to something in it


class Unsupported(Exception):
    """Part of this engine's state is not where the rest of this file could find it."""


@dataclass(frozen=True)
class Slot:
    """One kind of state of one stretch of a parameter: where it lives, and where a checkpoint's file has it."""

    tensor: Tensor  # contains it; empty while it is on NVMe
    at: Address  # of that tensor in a file; without keys: the file is nothing but its numbers
    offset: int  # of the stretch in that tensor
    start: int  # of the stretch in the flattened parameter
    numel: int

    @property
    def live(self) -> Tensor:
        """The stretch, flat or in the parameter's shape; writing to it changes the engine."""
        whole = self.tensor.detach()
        return whole if whole.numel() == self.numel else whole.view(-1).narrow(0, self.offset, self.numel)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A stretch of one parameter that this rank's optimizer steps on, or that it merely holds (frozen ones)."""

    parameter: nn.Parameter
    master: Tensor  # what the optimizer steps on: a flat partition of many parameters, or one in its own shape
    offset: int  # of the stretch in `master`
    start: int  # of the stretch in the flattened parameter
    numel: int
    master_at: Address
    states_at: Address | None  # of the dict by kind; None for a frozen parameter
    replicated: bool = False  # whether every data parallel rank holds the same
    # Muon's momentum at stages 1 and 2 is not cut at the partition's ends: where the whole parameter lies in it
    whole_offset: int | None = None
    group_numel: int | None = None  # and its length
    on_nvme: dict[int, str] = field(default_factory=dict)  # files by id of the tensor, for what is on NVMe

    def slots(self, states: dict[str, Any]) -> dict[str, Slot]:
        """By kind; `states` is what the optimizer has for `master`. Raises Unsupported for states of other shapes."""
        found = {MASTER: self._slot(self.master, self.master_at)}
        for kind, tensor in states.items():
            if not isinstance(tensor, Tensor) or kind == "step" or self.states_at is None:
                continue
            at = (self.states_at[0], (*self.states_at[1], kind))
            if kind == "momentum_buffer" and self.whole_offset is not None:
                found[kind] = Slot(tensor, at, self.whole_offset, 0, self.parameter.numel())
            elif tensor.numel() == self.master.numel():
                found[kind] = self._slot(tensor, at)
            else:
                raise Unsupported(f"the optimizer's {kind} is not one number a weight")
        return found

    def _slot(self, tensor: Tensor, at: Address) -> Slot:
        if id(tensor) in self.on_nvme:
            at = (self.on_nvme[id(tensor)], ())
        return Slot(tensor, at, self.offset, self.start, self.numel)


def inner_optimizer(engine: Any) -> Any:
    """The optimizer that steps, inside DeepSpeed's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def states_of(engine: Any, master: Tensor) -> dict[str, Any]:
    """What the optimizer has for a master; empty before its first step."""
    return inner_optimizer(engine).state.get(master, {})


def held(engine: Any, tag: str) -> list[Held]:
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
        for sub_group in range(len(optimizer.fp16_groups)):
            if not optimizer._swappable_optimizer_subgroup(sub_group):  # `in_memory` has done it
                optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    elif hasattr(optimizer, "fp16_groups"):
        for one in LAYOUTS[type(optimizer).__name__](engine, ""):
            one.parameter.data.copy_(one.slots({})[MASTER].live.view(one.parameter.shape))


def _plain(engine: Any, tag: str) -> Iterator[Held]:
    """No ZeRO, fp32: torch's optimizer on the module's own parameters."""
    module, states, index = _module_addresses(engine, tag), _model_states(engine, tag), count()
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            states_at = (states, ("optimizer", "state", next(index)))
            yield _alone(p, p, module[id(p)], states_at)


def _unfused(engine: Any, tag: str) -> Iterator[Held]:
    """No ZeRO, bf16 or fp16: a float32 copy of each parameter."""
    optimizer, states, index = engine.optimizer, _model_states(engine, tag), count()
    for i, (group, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for j, (p, master) in enumerate(zip(group, masters, strict=True)):
            states_at = (states, ("optimizer", "optimizer_state_dict", "state", next(index)))
            yield _alone(p, master, (states, ("optimizer", "fp32_groups", i, j)), states_at)


def _fused(engine: Any, tag: str) -> Iterator[Held]:
    """No ZeRO, bf16 or fp16 with FusedAdam: one flat float32 copy of each group."""
    optimizer, file = engine.optimizer, _model_states(engine, tag)
    for i, (group, master) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        at = (file, ("optimizer", "fp32_groups_flat", i))
        states_at = (file, ("optimizer", "optimizer_state_dict", "state", i))
        yield from _stretches(group, _packed(group), master, 0, at, states_at, replicated=True)


def _zero12(engine: Any, tag: str) -> Iterator[Held]:
    """Stages 1 and 2: each group flat, cut into equal partitions; round_robin_gradients orders it anew."""
    optimizer, file = engine.optimizer, _zero_states(engine, tag)
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


def _bf16(engine: Any, tag: str) -> Iterator[Held]:
    """A bf16 pipeline at stage 1 or below: like stage 1."""
    optimizer, file = engine.optimizer, _zero_states(engine, tag)
    for i, (group, master) in enumerate(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)):
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * master.numel()
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states_at = (file, ("optimizer_state_dict", "base_optimizer_state", "state", i))
        yield from _stretches(group, _packed(group), master, first, at, states_at)


def _zero3(engine: Any, tag: str) -> Iterator[Held]:
    """Stage 3: each parameter cut into equal parts, the last one padded; a rank's parts lie flat in sub groups."""
    optimizer, file = engine.optimizer, _zero_states(engine, tag)
    if optimizer.offload_optimizer and optimizer.partial_offload < 1:
        raise Unsupported("offload_optimizer.ratio below 1 keeps states in an optimizer that DeepSpeed does not save")
    of_group = optimizer.sub_group_to_group_id
    saved_order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (of_group[i], i))
    for index, i in enumerate(saved_order):
        at = (file, ("optimizer_state_dict", "fp32_flat_groups", i))
        states_at = (file, ("optimizer_state_dict", "optimizer_state_dict", "state", index))
        offset, on_nvme = 0, _swap_files(optimizer, i, tag)
        for p in optimizer.fp16_groups[i]:
            start, numel = _part(p)
            if numel > 0:
                yield Held(
                    parameter=p,
                    master=optimizer.fp32_partitioned_groups_flat[i],
                    offset=offset,
                    start=start,
                    numel=numel,
                    master_at=at,
                    states_at=states_at,
                    on_nvme=on_nvme,
                )
            offset += p.ds_tensor.ds_numel


def _swap_files(optimizer: Any, sub_group: int, tag: str) -> dict[int, str]:
    """Where saving copies what a sub group has on NVMe, by id of the tensor."""
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        return {}
    info = optimizer.optimizer_swapper.swap_params_info[optimizer.fp32_partitioned_groups_flat[sub_group].ds_id]
    folder = f"{tag}/offloaded_tensors/rank{dp_index_to_str(dist.get_rank())}"
    return {id(one.compute_tensor): f"{folder}/{Path(one.swap_path).name}" for one in info.tensors}


@contextmanager
def in_memory(engine: Any, master: Tensor) -> Iterator[None]:
    """Within it a master and its states are there to be written to, also if their place is on NVMe."""
    optimizer = engine.optimizer
    if not getattr(optimizer, "swap_optimizer", False):
        yield
        return
    sub_group = next(i for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat) if flat is master)
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)  # while the masters are there
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)


LAYOUTS = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _zero12,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
}


def _frozen(engine: Any, tag: str) -> Iterator[Held]:
    """Parameters that are not trained, in training precision."""
    module, names = _module_addresses(engine, tag), engine.param_names
    for p in engine.module.parameters():
        if p.requires_grad or p.numel() + getattr(p, "ds_numel", 0) == 0:
            continue
        if not hasattr(p, "ds_tensor"):
            yield _alone(p, p, module[id(p)], None)
            continue
        start, numel = _part(p)
        at = (_model_states(engine, tag), ("frozen_param_fragments", names[p]))
        if numel > 0:
            yield Held(
                parameter=p, master=p.ds_tensor, offset=0, start=start, numel=numel, master_at=at, states_at=None
            )


def _alone(parameter: nn.Parameter, master: Tensor, master_at: Address, states_at: Address | None) -> Held:
    """A whole parameter whose master is no part of a larger tensor, the same on every data parallel rank."""
    return Held(
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
) -> Iterator[Held]:
    """What of a flat group lies in `master`, its partition from element `first` on."""
    last = first + master.numel()
    inside = [(p, o) for p, o in zip(group, offsets, strict=True) if o < last and o + p.numel() > first]
    before = _packed([p for p, _ in inside])
    for (p, offset), whole_offset in zip(inside, before, strict=True):
        start, end = max(offset, first), min(offset + p.numel(), last)
        yield Held(
            parameter=p,
            master=master,
            offset=start - first,
            start=start - offset,
            numel=end - start,
            master_at=master_at,
            states_at=states_at,
            replicated=replicated,
            whole_offset=whole_offset if muon else None,
            group_numel=sum(p.numel() for p, _ in inside) if muon else None,
        )


def _packed(group: list[nn.Parameter]) -> list[int]:
    """Offsets of parameters that lie one after the other."""
    offsets = [0]
    for p in group:
        offsets.append(offsets[-1] + p.numel())
    return offsets[:-1]


def _part(p: nn.Parameter) -> tuple[int, int]:
    """Start and length of this rank's part of a partitioned parameter, without padding."""
    start = dist.get_rank(p.ds_process_group) * p.ds_tensor.ds_numel
    return start, min(p.ds_tensor.ds_numel, p.ds_numel - start)


def _model_states(engine: Any, tag: str) -> str:
    return engine._get_ckpt_name("", tag)


def _zero_states(engine: Any, tag: str) -> str:
    return engine._get_zero_ckpt_name("", tag)


def _module_addresses(engine: Any, tag: str) -> dict[int, Address]:
    """Where the module's own weights are written, by id of the tensor."""
    module = engine.module
    if not hasattr(module, "ckpt_layer_path"):
        file = _model_states(engine, tag)
        return {id(t): (file, ("module", name)) for name, t in module.state_dict(keep_vars=True).items()}
    layers = [(i, layer) for i, layer in enumerate(module.forward_funcs) if isinstance(layer, nn.Module)]
    return {
        id(t): (module.ckpt_layer_path(tag, i), (name,))
        for i, layer in layers
        for name, t in layer.state_dict(keep_vars=True).items()
    }
