"""Write checkpoints for other programs.

They are for a DeepSpeed engine on any number of ranks, or in PyTorch's distributed format. Tensors are copied one by
one into files that are mapped into memory, so the model may be larger than the memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

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
from zerofit.checkpoint.full_state import FullState, full_model
from zerofit.checkpoint.index import MASTER, ParameterGroup
from zerofit.checkpoint.model_folder import PLAN, refuse_small_disk, staged_folder
from zerofit.checkpoint.store import STATE, is_own, manifest_of
from zerofit.checkpoint.universal import engine_facts, refuse_without_frozen
from zerofit.models.dtypes import DTYPES
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write
from zerofit.spec.model_facts import Precision
from zerofit.spec.process import deepspeed_quiet
from zerofit.spec.run import Run

ALIGNMENT = 2  # elements per rank: runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor
SUB_GROUP = 10**9  # elements: the default of zero_optimization.sub_group_size


@dataclass(frozen=True, kw_only=True)
class Target:
    """The engine that will load a checkpoint."""

    ranks: int
    stage: int  # of ZeRO
    dtype: torch.dtype = torch.float32  # of training


@dataclass(frozen=True, kw_only=True)
class _TargetWriter:
    state: FullState
    groups: list[ParameterGroup]
    target: Target
    scratch: Path  # a file's place on the disk of the result
    wrote: Callable[[int], None]

    @cached_property
    def kinds(self) -> list[str]:
        """The optimizer's states. Frozen weights in a group have none."""
        kinds = (kind for group in self.groups for name in group.names for kind in self.state.kinds(name))
        return [kind for kind in dict.fromkeys(kinds) if kind != MASTER]

    def mapped(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros in a memory-mapped file, which disappears with the tensor."""
        if not count:
            return torch.zeros(0, dtype=dtype)
        with self.scratch.open("wb") as file:  # without its blocks, a full disk would kill the process at a mapped page
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        tensor = torch.from_file(str(self.scratch), shared=True, size=count, dtype=dtype)
        self.scratch.unlink()
        return tensor

    def flat(self, names: list[str], kind: str, first: int, count: int) -> Tensor:
        """Return `count` elements of a flat group from `first` on. After its end they are zero."""
        out = self.mapped(count)
        for name, skipped, start, end in self.stretches(names, first, first + count):
            if kind in self.state.kinds(name):
                self.state.fill(name, kind, out[start - first : end - first], skipped)
                self.wrote(4 * (end - start))
        return out

    def stretches(self, names: list[str], first: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield the parameters in a stretch of a flat group.

        A row has the name, the number of the parameter's elements before the stretch, and the first and last + 1
        element from the start of the group.
        """
        offset = 0
        for name in names:
            numel = self.state.numel(name)
            start, stop = max(first, offset), min(end, offset + numel)
            if start < stop:
                yield name, start - offset, start, stop
            offset += numel

    def step(self) -> Tensor:
        # torch's optimizers keep the step as a float32 tensor
        return torch.tensor(float(self.state.counters["step"] or 0))

    def loss_scaling(self) -> dict[str, object]:
        return loss_scaling(self.state.counters.get("loss_scaler"), fp16=self.target.dtype == torch.float16)

    def save(self, path: Path, content: Callable[[], object]) -> None:
        """Write a file completely or not at all, unless an interrupted call has written it."""
        if path.exists():
            self.wrote(path.stat().st_size)
            return
        with atomic_write(path) as file:
            torch.save(content(), file)


def write_deepspeed(
    state: FullState, target: Target, folder: Path, tag: str, wrote: Callable[[int], None] = lambda count: None
) -> None:
    """Write a checkpoint that a DeepSpeed engine loads with `load_checkpoint(folder)`.

    The engine must have the same parameters in the same groups.
    """
    tag_folder = folder / tag
    tag_folder.mkdir(exist_ok=True)
    groups = groups_of(state)
    writer = _TargetWriter(state=state, groups=groups, target=target, scratch=folder / ".scratch", wrote=wrote)
    with deepspeed_quiet():
        import deepspeed

        release = deepspeed.__version__
    common = _model_states(writer) | {"ds_version": release}
    if target.stage == 0:
        writer.save(
            tag_folder / MODEL, lambda: common | {"module": _weights(writer), "optimizer": _unpartitioned(writer)}
        )
    elif target.stage == 3:
        _write_stage_three(writer, common, tag_folder)
    else:
        shapes = [{name: torch.Size(state.shape(name)) for name in group.names} for group in groups]
        writer.save(tag_folder / MODEL, lambda: common | {"module": _weights(writer), "param_shapes": shapes})
        versions = {key: common[key] for key in ("ds_version", "ds_config")}
        for rank in range(target.ranks):
            partition = partial(_partition, writer, rank, release)
            writer.save(tag_folder / _optimizer_file(target, rank), _optimizer_states(partition, versions))
    (folder / "latest").write_text(tag)


MODEL = "mp_rank_00_model_states.pt"


def _optimizer_file(target: Target, rank: int) -> str:
    # An engine looks only for the prefix of its own precision (runtime/engine.py, `_get_all_zero_checkpoints`).
    bf16 = "bf16_" if target.dtype == torch.bfloat16 else ""
    return f"{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model_states(writer: _TargetWriter) -> dict[str, object]:
    counters, target = writer.state.counters, writer.target
    precision = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}
    return {
        "buffer_names": writer.state.buffers,
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": dict(writer.state.ties),
        "frozen_param_fragments": None,
        # for a checkpoint of zerofit `_opened` has set the first
        "lr_scheduler": counters.get("schedule") or counters["lr_scheduler"],
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": target.ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": target.stage}} | precision.get(target.dtype, {}),
    }


def _weights(writer: _TargetWriter) -> dict[str, Tensor]:
    """Return the module's state dict in the type of the training, including tied weights."""
    state, weights = writer.state, {}
    for name in state.names:
        shape = state.shape(name)
        weights[name] = writer.mapped(math.prod(shape), writer.target.dtype).view(shape)
        state.fill(name, MASTER, weights[name].view(-1))
    buffers = {name: state.buffer(name) for name in state.buffers}
    return weights | buffers | {name: weights[source] for name, source in state.ties.items()}


def _partition(writer: _TargetWriter, rank: int, release: str) -> dict[str, object]:
    """Return a rank's optimizer state at stages 1 and 2 (runtime/zero/stage_1_and_2.py)."""
    from deepspeed.utils.tensor_fragment import fragment_address

    # A group's parameters follow one another in one flat tensor, of which each rank has an equal, consecutive part.
    ranks, masters, paddings, states, mappings = writer.target.ranks, [], [], {}, []
    for number, group in enumerate(writer.groups):
        total = sum(writer.state.numel(name) for name in group.names)
        # all ranks have equal partitions; padding at the end of the group makes them so
        size = -(-total // (ALIGNMENT * ranks)) * ALIGNMENT
        first = rank * size
        real = min(max(total - first, 0), size)
        # DeepSpeed saves master weights without padding (_get_groups_without_padding), but optimizer states with it.
        masters.append(writer.flat(group.names, MASTER, first, real))
        paddings.append(size - real)
        states[number] = {"step": writer.step()}
        states[number] |= {kind: writer.flat(group.names, kind, first, size) for kind in writer.kinds}
        mappings.append(
            {
                name: fragment_address(numel=end - start, start=start - first)
                for name, _, start, end in writer.stretches(group.names, first, first + size)
            }
        )
    return {
        **writer.loss_scaling(),
        # without "clip_grad", an engine keeps the clipping of its own JSON (`_load_global_state`)
        "overflow": False,
        "base_optimizer_state": {
            "state": states,
            # at these stages, torch's optimizer has one flat parameter for each group
            "param_groups": [group.settings | {"params": [n]} for n, group in enumerate(writer.groups)],
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": writer.target.stage,
        "group_paddings": paddings,
        # DeepSpeed refuses paddings that differ from its own. Without zero_optimization.parameter_alignment they are 0.
        "param_alignment_paddings": [[0] * len(group.names) for group in writer.groups],
        "partition_count": [ranks] * len(writer.groups),
        # `_load_global_state` asserts that there is a version.
        "ds_version": release,
        "param_slice_mappings": mappings,
    }


def _unpartitioned(writer: _TargetWriter) -> dict[str, Any]:
    """Return the optimizer state of stage 0, as torch saves it.

    In 16 bits, return it as runtime/fp16/unfused_optimizer.py saves it.
    """
    number, states, numbered, masters = 0, {}, [], []
    for group in writer.groups:
        numbered.append(group.settings | {"params": [*range(number, number + len(group.names))]})
        masters.append([])
        for name in group.names:
            shape = writer.state.shape(name)
            states[number] = {"step": writer.step()} | {
                kind: writer.flat([name], kind, 0, math.prod(shape)).view(shape) for kind in writer.kinds
            }
            if writer.target.dtype != torch.float32:
                masters[-1].append(writer.flat([name], MASTER, 0, math.prod(shape)).view(shape))
            number += 1
    base = {"state": states, "param_groups": numbered}
    if writer.target.dtype == torch.float32:
        return base
    scaling = writer.loss_scaling()
    # this optimizer saves the scaler's numbers one by one, and no object
    scale = {"cur_iter": writer.state.counters["global_steps"]} | vars(scaling.pop("loss_scaler")) | scaling
    return scale | {"optimizer_state_dict": base, "fp32_groups": masters}


def _write_stage_three(writer: _TargetWriter, common: dict[str, object], folder: Path) -> None:
    """Write each rank's files of stage 3 (runtime/zero/stage3.py, _rigid_state_dict)."""
    state, target = writer.state, writer.target
    subs = [(n, names) for n, group in enumerate(writer.groups) for names in _sub_groups(writer, group.names)]
    # ZeRO-3 releases the module's weights, so its state dict has the names with empty tensors.
    module = {name: torch.empty(0, dtype=target.dtype) for name in (*state.names, *state.ties)}
    trained = {name for _, names in subs for name in names}
    frozen = {name: torch.Size(state.shape(name)) for name in state.names if name not in trained}
    shapes = [{name: torch.Size(state.shape(name)) for name in names} for _, names in subs]
    model = common | {"module": module | {name: state.buffer(name) for name in state.buffers}, "param_shapes": shapes}
    model |= {"frozen_param_shapes": frozen or None}
    # at stage 3, torch's optimizer has one flat parameter for each sub-group
    numbered = [
        group.settings | {"params": [i for i, (owner, _) in enumerate(subs) if owner == n]}
        for n, group in enumerate(writer.groups)
    ]
    versions = {key: common[key] for key in ("ds_version", "ds_config")}

    def weights(rank: int) -> dict[str, object]:
        fragments = {name: _share(writer, [name], MASTER, rank, target.dtype) for name in frozen}
        return model | {"frozen_param_fragments": fragments or None}

    def partition(rank: int) -> dict[str, object]:
        return {
            "zero_stage": 3,
            **writer.loss_scaling(),
            "overflow": False,
            "partition_count": target.ranks,
            "optimizer_state_dict": {
                "state": {
                    i: {"step": writer.step()} | {k: _share(writer, names, k, rank) for k in writer.kinds}
                    for i, (_, names) in enumerate(subs)
                },
                "param_groups": numbered,
            },
            "fp32_flat_groups": [_share(writer, names, MASTER, rank) for _, names in subs],
        }

    for rank in range(target.ranks):
        writer.save(folder / f"zero_pp_rank_{rank}_{MODEL}", partial(weights, rank))
        writer.save(folder / _optimizer_file(target, rank), _optimizer_states(partial(partition, rank), versions))


def _optimizer_states(partition: Callable[[], dict[str, object]], versions: dict[str, object]) -> Callable[[], object]:
    return lambda: {"optimizer_state_dict": partition(), **versions}


def _sub_groups(writer: _TargetWriter, names: list[str]) -> list[list[str]]:
    """Split a group like an engine with the default sub_group_size (_create_fp16_sub_groups)."""
    subs: list[list[str]] = [[]]
    size = 0
    for name in names:
        # DeepSpeed adds the parameter first and then compares, so a sub-group may exceed the limit by one parameter.
        if size >= SUB_GROUP:
            subs.append([])
            size = 0
        subs[-1].append(name)
        size += -(-writer.state.numel(name) // writer.target.ranks)
    return subs


def _share(writer: _TargetWriter, names: list[str], kind: str, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a rank's equal part of each parameter, concatenated."""
    state, ranks = writer.state, writer.target.ranks
    # every rank has an equal part; those of the last ranks may be shorter or empty, and end with zeros
    sizes = [-(-state.numel(name) // ranks) for name in names]
    out, offset = writer.mapped(sum(sizes), dtype), 0
    for name, size in zip(names, sizes, strict=True):
        numel = min(size, state.numel(name) - rank * size)
        if numel > 0 and kind in state.kinds(name):
            state.fill(name, kind, out[offset : offset + numel], rank * size)
            writer.wrote(4 * numel)
        offset += size
    return out


def write_distributed(state: FullState, folder: Path, wrote: Callable[[int], None] = lambda count: None) -> None:
    """Write a PyTorch distributed checkpoint with the keys of `get_state_dict`.

    These are `model` and `optimizer`. FSDP2 loads it with `torch.distributed.checkpoint.load` on any number of ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = Target(ranks=1, stage=0, dtype=torch.float32)
    groups = groups_of(state)
    writer = _TargetWriter(state=state, groups=groups, target=target, scratch=folder / ".scratch", wrote=wrote)
    optimizer = _unpartitioned(writer)
    # `get_state_dict` names states by parameter. The optimizer of stage 0 numbers them in the order of the groups.
    names = [name for group in groups for name in group.names]
    named = [group.settings | {"params": group.names} for group in groups]
    states = {name: optimizer["state"][number] for number, name in enumerate(names)}
    saved = {"model": _weights(writer), "optimizer": {"state": states, "param_groups": named}}
    failures = {}
    try:
        save(saved | {"step": state.counters["global_steps"]}, checkpoint_id=str(folder), no_dist=True)
    except CheckpointException as error:  # it is no Exception, and has the ranks' exceptions
        failures = error.failures
    for failure, _ in failures.values():
        raise failure


def convert_to(
    checkpoint: Path,
    out: Path,
    target: Target | None,
    dtype: Precision | None = None,
    *,
    repair: bool = False,
    run: Run | None = None,
    report: Reporter | None = None,
) -> ConvertResult:
    """Convert a checkpoint for the DeepSpeed engine `target`.

    If `target` is None, convert it to PyTorch's distributed format. `dtype` is the type in which the engine trains
    (default: as in the checkpoint). `repair` replaces the data of a lost rank. If another program wrote the checkpoint,
    `run` describes its model. Raises UserError.
    """
    report = report or Reporter()
    state, precision = _opened(checkpoint, repair, run)
    for repaired in state.repaired:
        report.note(repaired)
    if expert := next((name for name in state.names if ".deepspeed_experts." in name), None):
        message = f"{checkpoint} has a mixture of experts ({expert}), whose ranks have different parameters"
        hint = "use --to hf for the weights"
        raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where="--to"))
    if state.counters["step"] is None or not state.has_states:
        raise no_optimizer(state, str(checkpoint))
    if target:
        target = replace(target, dtype=DTYPES[dtype or precision])
    count = sum(state.numel(name) for name in state.names)
    total = sum(4 * state.numel(name) * len(state.kinds(name)) for name in state.names)
    # the content of a file, or of a distributed checkpoint, is on the disk in mapped files until it is written
    refuse_small_disk(out, total + total // (target.ranks if target and target.stage else 1))
    report.note(forecast(state, total, out, target.ranks if target and target.stage == 3 else 1))
    wrote, step = progress(report, total), state.counters["global_steps"]
    tag = f"global_step{step}"
    # torch writes a distributed checkpoint in one call, so nothing of it can be continued
    plan = conversion_plan(checkpoint, target, dtype, repair, run and run.model) if target else None
    with staged_folder(out, plan=plan) as staging:
        if target:
            write_deepspeed(state, target, staging, tag, wrote)
        else:
            write_distributed(state, staging, wrote)
        written = sum(file.stat().st_size for file in staging.rglob("*") if file.is_file() and file.name != PLAN)
    kind = "deepspeed" if target else "dcp"
    return ConvertResult(out=out, tag=tag if target else "", parameters=count, bytes=written, format=kind)


def _opened(checkpoint: Path, repair: bool, run: Run | None) -> tuple[FullState, Precision]:
    """Return a checkpoint with its optimizer's groups, and the precision of its training."""
    if not is_own(checkpoint) and (found := foreign_at(checkpoint)):
        state, precision = FullState(found.path, repair=repair, run=run), facts_of(found).precision
        named = {"bf16": "bf16", "fp16": "fp16"}.get(precision or "", "fp32")
        return state, cast("Precision", named)
    manifest = manifest_of(checkpoint)
    refuse_without_frozen(checkpoint, manifest)
    state = full_model(checkpoint)
    if manifest.job.facts.task == "gan":
        message = f"{checkpoint} has two DeepSpeed engines, one for each network of the GAN"
        raise UserError(Problem(kind="no-whole-view", message=message, hint="use --to universal", where="--to"))
    counters, optimizer = engine_facts(checkpoint / STATE, state)
    state.counters["schedule"] = counters.get("lr_scheduler")
    settings = optimizer["groups"]
    state.groups = [
        ParameterGroup(group.names, settings[number if number < len(settings) else 0])
        for number, group in enumerate(groups_of(state))
    ]
    return state, manifest.job.precision
