"""Find the master weights and states of DeepSpeed's optimizers in memory and in checkpoints.

The layouts follow the source of DeepSpeed 0.19.8. No other module uses these attributes of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from zerofit.checkpoint.full_state import MASTER
from zerofit.features.optimizers import of_json
from zerofit.spec.errors import Problem, RunFailed
from zerofit.train.tensor_split import share_of

# How ZeRO's flat partitions map to parameters, here three parameters over two ranks at stage 1 or 2:
#
#     group:      [ a a a a a | b b b b b b b | c c c ]     parameters one after another
#     partition:  [ rank 0          | rank 1          ]     equal lengths, the last one padded
#
# Rank 0 updates all of `a` and the first half of `b`. So it has two shards: (a, start 0, numel 5) at offset 0 of its
# master tensor, and (b, start 0, numel 3) at offset 5. Stage 3 instead cuts each parameter into equal parts and packs
# a rank's parts into sub groups. Adam's moments are tensors of the master's shape, so the same offsets apply to them.
Address = tuple[str, tuple[str | int, ...]]  # path of a file in the checkpoint, and keys into its contents


class Engine(Protocol):
    """The attributes of DeepSpeed's engine that zerofit reads, sets or calls to save and load."""

    module: nn.Module
    optimizer: Any  # DeepSpeed's or, without ZeRO in fp32, torch's; its attributes are in _OPTIMIZERS
    lr_scheduler: Any  # torch's or DeepSpeed's
    checkpoint_engine: CheckpointEngine
    device: torch.device
    mpu: object  # process groups of a layout with tensor or sequence parallelism
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
    param_names: dict[nn.Parameter, str]
    zenflow: bool
    has_moe_layers: bool
    _global_grad_norm: Tensor | float | None
    clip_fp32_gradients: Callable[[], None]
    gradient_clipping: Callable[[], float]
    get_global_grad_norm: Callable[[], Tensor | None]
    module_state_dict: Callable[..., dict[str, object]]
    save_checkpoint: Callable[..., object]
    load_checkpoint: Callable[..., tuple[str | None, object]]
    _copy_recovery_script: Callable[[str], None]
    _get_ckpt_name: Callable[[str, str], str]  # checkpoint folder and tag
    _get_zero_ckpt_name: Callable[[str, str], str]


class Unsupported(Exception):
    """Raised if a part of an engine's state has no known place in a checkpoint."""


@dataclass(frozen=True)
class StateSlot:
    """One kind of state for a part of a parameter: its tensor, and its address in a checkpoint."""

    tensor: Tensor  # the tensor that contains it; empty while it is on NVMe
    at: Address  # of that tensor in a file; without keys the file holds its raw numbers
    offset: int  # of the stretch in that tensor
    start: int  # of the stretch in the flattened parameter
    numel: int

    @property
    def live(self) -> Tensor:
        """The state as a view, flat or in the parameter's shape. Writing to it changes the engine."""
        stored = self.tensor.detach()
        return stored if stored.numel() == self.numel else stored.view(-1).narrow(0, self.offset, self.numel)


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """A part of one parameter that this rank's optimizer updates, or keeps if it is frozen."""

    parameter: nn.Parameter
    master: Tensor  # tensor that the optimizer updates: a flat partition, or one parameter in its own shape
    offset: int = 0  # of the stretch in `master`
    start: int = 0  # of the stretch in the flattened parameter
    numel: int
    master_at: Address
    states_at: Address | None  # of the dictionary of states by kind; None if frozen
    replicated: bool = False  # every data parallel rank has the same stretch
    # At stages 1 and 2 Muon's momentum is not cut at partition bounds: offset and length of the full parameter in it.
    uncut: tuple[int, int] | None = None
    on_nvme: dict[int, str] = field(default_factory=dict)  # files of the tensors on NVMe, by id of the tensor

    def slots(self, states: dict[str, object]) -> dict[str, StateSlot]:
        """Return the slots by kind. `states`: the states of `master`.

        Raises Unsupported for states of other sizes.
        """
        slots = {MASTER: self._slot(self.master, self.master_at)}
        for kind, tensor in states.items():
            if not isinstance(tensor, Tensor) or kind == "step" or self.states_at is None:
                continue
            at = (self.states_at[0], (*self.states_at[1], kind))
            if kind == "momentum_buffer" and self.uncut is not None:
                slots[kind] = StateSlot(tensor, at, self.uncut[0], 0, self.parameter.numel())
            elif tensor.numel() == self.master.numel():
                slots[kind] = self._slot(tensor, at)
            else:
                raise Unsupported(f"the optimizer's {kind} does not have one number per weight")
        return slots

    def _slot(self, tensor: Tensor, at: Address) -> StateSlot:
        if id(tensor) in self.on_nvme:
            at = (self.on_nvme[id(tensor)], ())
        return StateSlot(tensor, at, self.offset, self.start, self.numel)


# undocumented attributes that zerofit reads or calls, by DeepSpeed class
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


def check_attributes(engine: Engine) -> None:
    """Raise RunFailed if DeepSpeed's engine or optimizer lacks an attribute that a save needs."""
    optimizer = engine.optimizer
    wanted = [(engine, _ENGINE), (optimizer, _OPTIMIZERS.get(type(optimizer).__name__, ()))]
    missing = [f"{type(obj).__name__}.{name}" for obj, names in wanted for name in names if not hasattr(obj, name)]
    if missing:
        message = f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}, needed to save checkpoints"
        hint = "install a version that zerofit was tested with: pip install 'deepspeed>=0.19.8,<0.20'"
        raise RunFailed(Problem(kind="deepspeed-version", message=message, hint=hint))


def inner_optimizer(engine: Engine) -> Optimizer:
    """Return the optimizer that DeepSpeed's optimizer wraps."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def loss_scaler(engine: Engine) -> Any | None:
    """Return fp16's dynamic loss scaler at any ZeRO stage; None if there is none."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    return scaler if dynamic else None


def states_of(engine: Engine, master: Tensor) -> dict[str, object]:
    """Return the states of a master tensor by kind; {} if they are not one number per weight."""
    inner = inner_optimizer(engine)
    # Some optimizers keep numbers per block, row or column. These are only in the engine's own files, for the layout
    # that wrote them (checkpoint/compatible.py).
    entry = of_json(type(inner).__name__)
    return inner.state.get(master, {}) if entry is None or entry.states.by_weight else {}


def local_shards(engine: Engine, tag: str, frozen: bool = True) -> list[ParamShard]:
    """Return this rank's shards; with `frozen`, also those of frozen weights.

    `tag`: folder of the files. Raises Unsupported if the engine's layout is unknown.
    """
    kind = type(engine.optimizer).__name__
    if engine.zenflow or (kind not in LAYOUTS and hasattr(engine.optimizer, "optimizer")):
        raise Unsupported(f"{kind} keeps part of its state in an unsupported layout")
    if engine.has_moe_layers and not any(share_of(p) for p in engine.module.parameters()):
        raise Unsupported("DeepSpeed's own layers of experts (moe.layer.MoE) write separate files on each rank")
    return [*LAYOUTS.get(kind, _plain)(engine, tag), *(frozen_shards(engine, tag) if frozen else ())]


@torch.no_grad()
def to_training_precision(engine: Engine) -> None:
    """Copy the optimizer's master weights into the module, as loading a checkpoint does."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()  # updates this rank's partition, then gathers all
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for sub_group in range(len(optimizer.fp16_groups)):
            if not optimizer._swappable_optimizer_subgroup(sub_group):  # `in_memory` has done it
                optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    elif hasattr(optimizer, "fp16_groups"):
        for shard in LAYOUTS[type(optimizer).__name__](engine, ""):
            shard.parameter.data.copy_(shard.slots({})[MASTER].live.view(shard.parameter.shape))


def _plain(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in fp32: torch's optimizer updates the module's own parameters."""
    module, states, index = _module_addresses(engine, tag), engine._get_ckpt_name("", tag), count()
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            states_at = (states, ("optimizer", "state", next(index)))
            yield _alone(p, p, module[id(p)], states_at)


def _unfused(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in bf16 or fp16, where each parameter has a float32 copy."""
    optimizer, states, index = engine.optimizer, engine._get_ckpt_name("", tag), count()
    for i, (group, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for j, (p, master) in enumerate(zip(group, masters, strict=True)):
            states_at = (states, ("optimizer", "optimizer_state_dict", "state", next(index)))
            yield _alone(p, master, (states, ("optimizer", "fp32_groups", i, j)), states_at)


def _fused(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards without ZeRO in bf16 or fp16 with FusedAdam: a flat float32 copy per group."""
    optimizer, file = engine.optimizer, engine._get_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        at = (file, ("optimizer", "fp32_groups_flat", i))
        states_at = (file, ("optimizer", "optimizer_state_dict", "state", i))
        partition = _Partition(master=master, first=0, master_at=at, states_at=states_at, replicated=True)
        yield from partition.shards(group, _packed(group))


def _zero12(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards of stages 1 and 2, which divide each flat group equally."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    for i, group in enumerate(optimizer.round_robin_bit16_groups):  # in the order of round_robin_gradients, if set
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * optimizer.partition_size[i]
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states = ("base_optimizer_state", i) if optimizer.elastic_checkpoint else ("base_optimizer_state", "state", i)
        partition = _Partition(
            master=optimizer.single_partition_of_fp32_groups[i],
            first=first,
            master_at=at,
            states_at=(file, ("optimizer_state_dict", *states)),
            muon=optimizer.optimizer.param_groups[i].get("use_muon", False) and not optimizer.cpu_offload,
        )
        yield from partition.shards(group, optimizer.round_robin_bit16_offsets[i])


def _bf16(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards of a bf16 pipeline at stage 0 or 1, which are laid out as at stage 1."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    for i, (group, master) in enumerate(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)):
        first = dist.get_rank(optimizer.real_dp_process_group[i]) * master.numel()
        at = (file, ("optimizer_state_dict", "single_partition_of_fp32_groups", i))
        states_at = (file, ("optimizer_state_dict", "base_optimizer_state", "state", i))
        partition = _Partition(master=master, first=first, master_at=at, states_at=states_at)
        yield from partition.shards(group, _packed(group))


def _zero3(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield shards of stage 3: equal parts of each parameter (with padding), in flat sub-groups."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    if optimizer.offload_optimizer and optimizer.partial_offload < 1:
        raise Unsupported("offload_optimizer.ratio below 1 keeps states in an optimizer that DeepSpeed does not save")
    of_group = optimizer.sub_group_to_group_id
    # DeepSpeed saves sub groups in the order of their parameter groups, and the states under their place in that
    # order.
    saved_order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (of_group[i], i))
    for index, i in enumerate(saved_order):
        at = (file, ("optimizer_state_dict", "fp32_flat_groups", i))
        states_at = (file, ("optimizer_state_dict", "optimizer_state_dict", "state", index))
        master = optimizer.fp32_partitioned_groups_flat[i]
        on_nvme: dict[int, str] = {}  # files to which a save copies the sub-group's tensors, by id of the tensor
        if optimizer._swappable_optimizer_subgroup(i):
            info = optimizer.optimizer_swapper.swap_params_info[master.ds_id]
            folder = f"{tag}/offloaded_tensors/rank{dp_index_to_str(dist.get_rank())}"
            on_nvme = {id(t.compute_tensor): f"{folder}/{Path(t.swap_path).name}" for t in info.tensors}
        offset = 0
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


def frozen_shards(engine: Engine, tag: str) -> Iterator[ParamShard]:
    """Yield parameters that are not trained, in training precision."""
    frozen = [p for p in engine.module.parameters() if not p.requires_grad and p.numel() + getattr(p, "ds_numel", 0)]
    module = _module_addresses(engine, tag) if frozen else {}
    for p in frozen:
        partition: Tensor | None = getattr(p, "ds_tensor", None)  # set by ZeRO-3
        if partition is not None:
            at = (engine._get_ckpt_name("", tag), ("frozen_param_fragments", engine.param_names[p]))
            yield _partitioned(p, partition, 0, at, None, {})
        else:
            yield _alone(p, p, module[id(p)], None)


def _alone(p: nn.Parameter, master: Tensor, master_at: Address, states_at: Address | None) -> ParamShard:
    """Return the shard of a parameter with its own master tensor, which all data ranks have."""
    addresses = {"master_at": master_at, "states_at": states_at}
    return ParamShard(parameter=p, master=master, numel=p.numel(), replicated=True, **addresses)


def _partitioned(
    p: Any, master: Tensor, offset: int, master_at: Address, states_at: Address | None, on_nvme: dict[int, str]
) -> ParamShard:
    """Return this rank's part of a ZeRO-3 parameter, without padding. The part may be empty."""
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


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """A part of a flat group of parameters that this rank's optimizer updates."""

    master: Tensor
    first: int  # its first element in the group
    master_at: Address
    states_at: Address
    replicated: bool = False  # every data parallel rank holds the full group
    muon: bool = False  # Muon's momentum covers the complete parameters that overlap the partition

    def shards(self, group: list[nn.Parameter], offsets: list[int]) -> Iterator[ParamShard]:
        """Yield the shards of the group's parameters. `offsets`: where each parameter begins."""
        first, last = self.first, self.first + self.master.numel()
        # parameters that overlap [first, last), with their offsets in the group
        inside = [(p, o) for p, o in zip(group, offsets, strict=True) if o < last and o + p.numel() > first]
        # Muon's momentum contains these parameters in full, one after another
        *before, total = accumulate((p.numel() for p, _ in inside), initial=0)
        for (p, offset), momentum_offset in zip(inside, before, strict=True):
            start, end = max(offset, first), min(offset + p.numel(), last)
            yield ParamShard(
                parameter=p,
                master=self.master,
                offset=start - first,
                start=start - offset,
                numel=end - start,
                master_at=self.master_at,
                states_at=self.states_at,
                replicated=self.replicated,
                uncut=(momentum_offset, total) if self.muon else None,
            )


def _packed(group: list[nn.Parameter]) -> list[int]:
    return [0, *accumulate(p.numel() for p in group)][:-1]


def _module_addresses(engine: Engine, tag: str) -> dict[int, Address]:
    """Return the addresses of the module's own weights in a checkpoint, by id of the tensor."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        file = engine._get_ckpt_name("", tag)
        return {id(t): (file, ("module", name)) for name, t in module.state_dict(keep_vars=True).items()}
    addresses: dict[int, Address] = {}
    # A stage of DualPipeV has two phases. Its functions and its paths are those of the active phase.
    phases = range(len(module.phase_bounds)) if isinstance(module, DualPipeVModule) else range(1)
    for phase in phases:
        if isinstance(module, DualPipeVModule):
            module.activate_phase(phase)
        for i, layer in enumerate(module.forward_funcs):
            if isinstance(layer, nn.Module):
                names = layer.state_dict(keep_vars=True)
                addresses |= {id(t): (module.ckpt_layer_path(tag, i), (name,)) for name, t in names.items()}
    return addresses


@contextmanager
def partitioned(engine: Engine) -> Iterator[None]:
    """Partition all parameters of ZeRO-3 inside this context. Gather persistent ones afterwards.

    A step may leave parameters gathered for the next forward. GatheredParameters and changes of masters need them
    partitioned.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    yield
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


@contextmanager
def in_memory(engine: Engine, master: Tensor) -> Iterator[None]:
    """Read a master tensor and its states from NVMe if needed. Write them back at the end."""
    optimizer = engine.optimizer
    groups = optimizer.fp32_partitioned_groups_flat if getattr(optimizer, "swap_optimizer", False) else []
    sub_group = next((i for i, flat in enumerate(groups) if flat is master), None)
    if sub_group is None or not optimizer._swappable_optimizer_subgroup(sub_group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)  # needs the masters in memory
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)
