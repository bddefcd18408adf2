"""Layouts of each DeepSpeed optimizer's master weights and states: in memory, on NVMe and in its files.

Read in the source of DeepSpeed 0.19.8; nothing else here knows these attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.pipe import DualPipeVModule
from torch import Tensor, nn

from zerofit.checkpoint.full_state import MASTER
from zerofit.spec.errors import Problem, RunFailed
from zerofit.train.expert_split import share_of

Address = tuple[str, tuple[Any, ...]]  # a file, by its path in the checkpoint, and the keys to something in it


class Unsupported(Exception):
    """Raised where part of an engine's state is not where a checkpoint could have it."""


@dataclass(frozen=True)
class StateSlot:
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
class ParamShard:
    """A stretch of one parameter that this rank's optimizer steps on, or that it merely holds (frozen ones)."""

    parameter: nn.Parameter
    master: Tensor  # what the optimizer steps on: a flat partition of many parameters, or one in its own shape
    offset: int  # of the stretch in `master`
    start: int  # of the stretch in the flattened parameter
    numel: int
    master_at: Address
    states_at: Address | None  # of the dict by kind; None for a frozen parameter
    replicated: bool = False  # whether every data parallel rank holds the same
    # Muon's momentum at stages 1 and 2 is not cut where the partition is: where the whole parameter begins in it, and
    # its length
    uncut: tuple[int, int] | None = None
    on_nvme: dict[int, str] = field(default_factory=dict)  # files by id of the tensor, for what is on NVMe

    def slots(self, states: dict[str, Any]) -> dict[str, StateSlot]:
        """Return the slots by kind; `states`: the optimizer's for `master`. Raises Unsupported for other shapes."""
        found = {MASTER: self._slot(self.master, self.master_at)}
        for kind, tensor in states.items():
            if not isinstance(tensor, Tensor) or kind == "step" or self.states_at is None:
                continue
            at = (self.states_at[0], (*self.states_at[1], kind))
            if kind == "momentum_buffer" and self.uncut is not None:
                found[kind] = StateSlot(tensor, at, self.uncut[0], 0, self.parameter.numel())
            elif tensor.numel() == self.master.numel():
                found[kind] = self._slot(tensor, at)
            else:
                raise Unsupported(f"the optimizer's {kind} is not one number a weight")
        return found

    def _slot(self, tensor: Tensor, at: Address) -> StateSlot:
        if id(tensor) in self.on_nvme:
            at = (self.on_nvme[id(tensor)], ())
        return StateSlot(tensor, at, self.offset, self.start, self.numel)


# attributes that this project reads or calls, by DeepSpeed's class; its documentation promises none of them
_ENGINE = ("checkpoint_engine", "seq_data_parallel_group", "seq_dp_world_size", "zenflow", "has_moe_layers")
_ENGINE += ("param_names", "global_steps", "global_samples", "skipped_steps", "lr_scheduler", "_copy_recovery_script")
_ENGINE += ("_get_ckpt_name", "_get_zero_ckpt_name", "_consolidated_16bit_state_dict", "clip_fp32_gradients")
_OPTIMIZERS = {
    "FP16_UnfusedOptimizer": ("optimizer", "fp16_groups", "fp32_groups"),
    "FP16_Optimizer": ("optimizer", "fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
    "DeepSpeedZeroOptimizer": (
        *("optimizer", "round_robin_bit16_groups", "round_robin_bit16_offsets", "real_dp_process_group"),
        *("partition_size", "elastic_checkpoint", "single_partition_of_fp32_groups", "cpu_offload"),
        *("update_lp_params", "scaled_global_norm", "_model_parallel_all_reduce"),
    ),
    "BF16_Optimizer": (
        *("optimizer", "bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group", "update_lp_params"),
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        *("optimizer", "sub_group_to_group_id", "fp16_groups", "fp32_partitioned_groups_flat"),
        *("offload_optimizer", "partial_offload", "swap_optimizer", "_swappable_optimizer_subgroup"),
        *("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"),
        *("_reassign_or_swap_out_partitioned_parameters",),
    ),
}


def check_attributes(engine: Any) -> None:
    """Raise RunFailed for a DeepSpeed whose engine or optimizer lacks what a save would need hours later."""
    optimizer = engine.optimizer
    wanted = [(engine, _ENGINE), (optimizer, _OPTIMIZERS.get(type(optimizer).__name__, ()))]
    missing = [f"{type(one).__name__}.{name}" for one, names in wanted for name in names if not hasattr(one, name)]
    if missing:
        message = f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}, which zerofit saves checkpoints by"
        hint = "install a version that zerofit was tested with: pip install 'deepspeed>=0.19.8,<0.20'"
        raise RunFailed(Problem(kind="deepspeed-version", message=message, hint=hint))


def inner_optimizer(engine: Any) -> Any:
    """Return the optimizer that steps, inside DeepSpeed's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def states_of(engine: Any, master: Tensor) -> dict[str, Any]:
    """Return the states of a master by kind; none of optimizers that keep numbers of blocks, rows or columns.

    Those are in the engine's own files alone, for the layout that wrote them (checkpoint/compatible.py).
    """
    inner = inner_optimizer(engine)
    of_blocks = isinstance(inner, torch.optim.Adafactor) or type(inner).__module__.startswith("bitsandbytes.")
    return {} if of_blocks else inner.state.get(master, {})


def local_shards(engine: Any, tag: str, frozen: bool = True) -> list[ParamShard]:
    """Return all that this rank has, or only what it trains; `tag` is the folder of the engine's files.

    Raises Unsupported where that is not known.
    """
    kind = type(engine.optimizer).__name__
    if engine.zenflow or (kind not in LAYOUTS and hasattr(engine.optimizer, "optimizer")):
        raise Unsupported(f"{kind} keeps part of its state in a way of its own")
    if engine.has_moe_layers and not any(share_of(p) for p in engine.module.parameters()):
        raise Unsupported("DeepSpeed's own layers of experts (moe.layer.MoE) have files of their own on each rank")
    return [*LAYOUTS.get(kind, _plain)(engine, tag), *(frozen_shards(engine, tag) if frozen else ())]


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


def _plain(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in fp32: torch's optimizer on the module's own parameters."""
    module, states, index = _module_addresses(engine, tag), engine._get_ckpt_name("", tag), count()
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            states_at = (states, ("optimizer", "state", next(index)))
            yield _alone(p, p, module[id(p)], states_at)


def _unfused(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in bf16 or fp16: a float32 copy of each parameter."""
    optimizer, states, index = engine.optimizer, engine._get_ckpt_name("", tag), count()
    for i, (group, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for j, (p, master) in enumerate(zip(group, masters, strict=True)):
            states_at = (states, ("optimizer", "optimizer_state_dict", "state", next(index)))
            yield _alone(p, master, (states, ("optimizer", "fp32_groups", i, j)), states_at)


def _fused(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in bf16 or fp16 with FusedAdam: one flat float32 copy of each group."""
    optimizer, file = engine.optimizer, engine._get_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        at = (file, ("optimizer", "fp32_groups_flat", i))
        states_at = (file, ("optimizer", "optimizer_state_dict", "state", i))
        yield from _stretches(group, _packed(group), master, 0, at, states_at, replicated=True)


def _zero12(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield shards of stages 1 and 2: each group flat, in equal partitions; round_robin_gradients orders it anew."""
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
    """Yield shards of a bf16 pipeline at stage 1 or below: as at stage 1."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)):
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * master.numel()
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states_at = (file, ("optimizer_state_dict", "base_optimizer_state", "state", i))
        yield from _stretches(group, _packed(group), master, first, at, states_at)


def _zero3(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield shards of stage 3: equal parts of each parameter, the last one padded; a rank's lie flat in sub groups."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    if optimizer.offload_optimizer and optimizer.partial_offload < 1:
        raise Unsupported("offload_optimizer.ratio below 1 keeps states in an optimizer that DeepSpeed does not save")
    of_group = optimizer.sub_group_to_group_id
    saved_order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (of_group[i], i))
    for index, i in enumerate(saved_order):
        at = (file, ("optimizer_state_dict", "fp32_flat_groups", i))
        states_at = (file, ("optimizer_state_dict", "optimizer_state_dict", "state", index))
        offset, on_nvme = 0, _swap_files(optimizer, i, tag)
        master = optimizer.fp32_partitioned_groups_flat[i]
        for p in optimizer.fp16_groups[i]:
            yield _partitioned(p, master, offset, at, states_at, on_nvme)
            offset += p.ds_tensor.ds_numel


LAYOUTS = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "DeepSpeedZeroOptimizer": _zero12,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
}


def frozen_shards(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Yield parameters that are not trained, in training precision."""
    found = [p for p in engine.module.parameters() if not p.requires_grad and p.numel() + getattr(p, "ds_numel", 0)]
    module = _module_addresses(engine, tag) if found else {}
    for p in found:
        if hasattr(p, "ds_tensor"):
            at = (engine._get_ckpt_name("", tag), ("frozen_param_fragments", engine.param_names[p]))
            yield _partitioned(p, p.ds_tensor, 0, at, None, {})
        else:
            yield _alone(p, p, module[id(p)], None)


def _alone(parameter: nn.Parameter, master: Tensor, master_at: Address, states_at: Address | None) -> ParamShard:
    """Return a whole parameter whose master is no part of a larger tensor, the same on every data parallel rank."""
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


def _partitioned(
    p: Any, master: Tensor, offset: int, master_at: Address, states_at: Address | None, on_nvme: dict[int, str]
) -> ParamShard:
    """Return this rank's part of a ZeRO-3 parameter, without padding; may be empty."""
    start = dist.get_rank(p.ds_process_group) * p.ds_tensor.ds_numel
    return ParamShard(
        parameter=p,
        master=master,
        offset=offset,
        start=start,
        numel=max(0, min(p.ds_tensor.ds_numel, p.ds_numel - start)),
        master_at=master_at,
        states_at=states_at,
        on_nvme=on_nvme,
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
    """Return what of a flat group lies in `master`, its partition from element `first` on."""
    last = first + master.numel()
    inside = [(p, o) for p, o in zip(group, offsets, strict=True) if o < last and o + p.numel() > first]
    *before, total = accumulate((p.numel() for p, _ in inside), initial=0)
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


def _packed(group: list[nn.Parameter]) -> list[int]:
    """Return the offsets of parameters that lie one after the other."""
    return [0, *accumulate(p.numel() for p in group)][:-1]


def _module_addresses(engine: Any, tag: str) -> dict[int, Address]:
    """Return where the module's own weights are written, by id of the tensor."""
    module = engine.module
    if not hasattr(module, "ckpt_layer_path"):
        file = engine._get_ckpt_name("", tag)
        return {id(t): (file, ("module", name)) for name, t in module.state_dict(keep_vars=True).items()}
    found: dict[int, Address] = {}
    for _ in _parts_exposed(module):
        layers = [(i, layer) for i, layer in enumerate(module.forward_funcs) if isinstance(layer, nn.Module)]
        for i, layer in layers:
            names = layer.state_dict(keep_vars=True)
            found |= {id(t): (module.ckpt_layer_path(tag, i), (name,)) for name, t in names.items()}
    return found


def _parts_exposed(module: Any) -> Iterator[None]:
    """Have a pipeline's module expose each part of the layers that it holds, one after the other."""
    if not isinstance(module, DualPipeVModule):
        yield
        return
    for phase in range(len(module.phase_bounds)):
        module.activate_phase(phase)
        yield


def _swap_files(optimizer: Any, sub_group: int, tag: str) -> dict[int, str]:
    """Return where saving copies what a sub group has on NVMe, by id of the tensor."""
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        return {}
    info = optimizer.optimizer_swapper.swap_params_info[optimizer.fp32_partitioned_groups_flat[sub_group].ds_id]
    folder = f"{tag}/offloaded_tensors/rank{dp_index_to_str(dist.get_rank())}"
    return {id(one.compute_tensor): f"{folder}/{Path(one.swap_path).name}" for one in info.tensors}


@contextmanager
def in_memory(engine: Any, master: Tensor) -> Iterator[None]:
    """Have a master and its states there to be written to, also if their place is on NVMe."""
    optimizer = engine.optimizer
    groups = optimizer.fp32_partitioned_groups_flat if getattr(optimizer, "swap_optimizer", False) else []
    sub_group = next((i for i, flat in enumerate(groups) if flat is master), None)
    if sub_group is None or not optimizer._swappable_optimizer_subgroup(sub_group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)  # while the masters are there
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)
