"""Resume from a checkpoint, with DeepSpeed if it can read the files, else shard by shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.compatible import piece_by_piece
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.index import MASTER, SCALER
from zerofit.checkpoint.store import is_own, read_manifest
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run_folder import Start
from zerofit.spec.units import counted
from zerofit.train.callbacks import StepRecord
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine
from zerofit.train.saver import refuse_other_frozen
from zerofit.train.shard_index import IndexedShard, indexed_shards
from zerofit.train.trainer import EngineTrainer, persistent_buffers
from zerofit.train.zero_layouts import (
    Engine,
    Unsupported,
    in_memory,
    inner_optimizer,
    loss_scaler,
    partitioned,
    to_training_precision,
)

# Which way a checkpoint is read:
#
#     same layout           engine.load_checkpoint: each rank reads its own files; random states continue, bit for bit
#     any other layout,     build engines with fresh weights, then for each stretch that this rank updates: find its
#     or files that         name and place in the full model, read that part of the full tensor from the index of all
#     DeepSpeed misreads    ranks' files, and copy it into the optimizer's master and states
FROM_CHECKPOINT = ("params", "lr", "initial_lr", "step")  # keys of optimizer groups that a resume does not restore
REPORT_EVERY_S = 2.0


def resume(trainer: EngineTrainer, start: Start, progress: Callable[[str], None]) -> StepRecord | None:
    """Load a checkpoint into freshly built engines. Return the record of its last step."""
    checkpoint = Path(start.checkpoint)
    manifest = read_manifest(checkpoint) if is_own(checkpoint) else None  # None: of another program
    refuse_other_frozen(trainer, manifest and manifest.frozen)
    # noted before loading, which overwrites them with the checkpoint's
    settings = [_RunSettings(engine) for engine in trainer.engines().values()]
    if start.same_layout and not piece_by_piece(trainer.job):
        for tag, engine in trainer.engines().items():
            if not isinstance(engine.checkpoint_engine, SyncedCheckpointEngine):
                engine.checkpoint_engine = SyncedCheckpointEngine(trainer.job.layout.zero_stage)
            strict = trainer.job.run.partial is None
            path, _ = engine.load_checkpoint(str(checkpoint), tag=tag, load_module_strict=strict)
            assert path is not None, f"DeepSpeed finds no checkpoint in {checkpoint}, although zerofit verified it"
    else:
        for tag, engine in trainer.engines().items():
            _restore_shards(trainer, engine, tag, FullState(checkpoint, {tag: ""}, run=trainer.job.run), progress)
    # random states belong to ranks, so only the same layout can continue bit for bit
    if start.same_layout:
        trainer.restore_rank_state(safe_load.load(checkpoint / "ranks" / f"rank-{dist.get_rank():05}.pt", mmap=False))
    if trainer.averaged:
        trainer.averaged.restore(checkpoint, dist.get_rank() if start.same_layout else None)
    for saved_settings in settings:
        saved_settings.put_back()
    dist.barrier()
    return cast(StepRecord, manifest.figures) if manifest and manifest.figures else None


class _RunSettings:
    """Settings of this start that a load would overwrite: learning rate, weight decay, betas, clipping."""

    def __init__(self, engine: Engine):
        self._engine = engine
        groups: list[dict[str, object]] = engine.optimizer.param_groups
        self._groups = [{k: v for k, v in group.items() if k not in FROM_CHECKPOINT} for group in groups]
        scheduler = engine.lr_scheduler
        self._base = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else None

    def put_back(self) -> None:
        for group, settings in zip(self._engine.optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        if hasattr(self._engine.optimizer, "clip_grad"):  # DeepSpeed's own, except at stage 3, load the checkpoint's
            self._engine.optimizer.clip_grad = self._engine.gradient_clipping()
        if self._base is not None:
            scheduler: LambdaLR = self._engine.lr_scheduler
            scheduler.base_lrs = self._base
            _set_rates(scheduler)
            for group, base in zip(scheduler.optimizer.param_groups, self._base, strict=True):
                group["initial_lr"] = base


def _restore_shards(
    trainer: EngineTrainer, engine: Engine, tag: str, saved: FullState, progress: Callable[[str], None]
) -> None:
    """Load weights, states, counters and schedule from a checkpoint of any layout.

    Raises UserError if the checkpoint lacks a parameter or has it with a different shape, or if the engine's layout is
    not supported.
    """
    try:
        shards = list(indexed_shards(trainer, engine, tag))
    except Unsupported as reason:
        message = f"the new layout cannot load a checkpoint of another layout: {reason}"
        raise _error("no-restore", message) from None
    # another program may have saved the names with a wrapper's prefix
    saved.match(dict.fromkeys(shard.name for shard in shards))
    _refuse_other_model(shards, saved)
    with partitioned(engine):
        _fill(engine, shards, saved, progress)
        to_training_precision(engine)
    _set_counters(engine, saved.counters)
    names, saved_buffers = trainer.state_names(engine).buffers, set(saved.buffers)
    with torch.no_grad():
        for _, buffer in persistent_buffers(engine.module):
            if names[id(buffer)] in saved_buffers:
                buffer.copy_(saved.buffer(names[id(buffer)]))


def _refuse_other_model(shards: list[IndexedShard], saved: FullState) -> None:
    names = {*saved.names, *saved.ties}
    missing = sorted({p.name for p in shards} - names)
    reshaped = sorted({p.name for p in shards if p.name in names and saved.shape(p.name) != p.shape})
    if missing:
        message = f"the checkpoint lacks {counted(len(missing), 'parameter')} of the model, for example {missing[0]}"
        raise _error("other-model", message)
    if reshaped:
        shape = next(p.shape for p in shards if p.name == reshaped[0])
        message = f"{reshaped[0]} has shape {saved.shape(reshaped[0])} in the checkpoint and {shape} in the model"
        raise _error("other-model", message)


def _make_states(inner: Optimizer, indexed: IndexedShard, saved: FullState) -> None:
    """Allocate zeros for the states in the checkpoint. An optimizer does this at its first step."""
    if indexed.shard.states_at is None:
        return
    master, uncut = indexed.shard.master, indexed.shard.uncut
    states = inner.state[master]
    wider = getattr(inner, "fp32_optimizer_states", False)  # DeepSpeedCPUAdam, for masters of any precision
    for kind in saved.kinds(indexed.name):
        if kind == MASTER or kind in states:
            continue
        if kind == "momentum_buffer" and uncut is not None:
            states[kind] = torch.zeros(uncut[1], dtype=master.dtype, device=master.device)
        else:
            dtype = torch.float32 if wider else master.dtype
            states[kind] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
    if saved.counters["step"] is not None and set(states) - {"momentum_buffer"}:
        states["step"] = _step_state(inner, saved.counters["step"], master)


def _step_state(inner: Optimizer, step: int, master: Tensor) -> Tensor | int:
    """Return the number of steps as the optimizer stores it: torch's as a tensor."""
    counting = getattr(inner, "aux_optimizer", None) or inner  # Muon updates only matrices; an Adam updates the rest
    if not type(counting).__module__.startswith("torch.optim"):
        return step
    on_device = any(group.get("fused") or group.get("capturable") for group in counting.param_groups)
    return torch.tensor(float(step), device=master.device if on_device else "cpu")


@torch.no_grad()
def _fill(engine: Engine, shards: list[IndexedShard], saved: FullState, progress: Callable[[str], None]) -> None:
    inner, done, reported = inner_optimizer(engine), 0, time.monotonic()
    # each master is read from NVMe once, for all of its shards
    for _, group in groupby(shards, key=lambda indexed: id(indexed.shard.master)):
        members = list(group)
        with in_memory(engine, members[0].shard.master):
            for indexed in members:
                _make_states(inner, indexed, saved)
            for indexed in members:
                _fill_shard(indexed, inner.state.get(indexed.shard.master, {}), saved)
                done += 1
                if time.monotonic() - reported > REPORT_EVERY_S:
                    reported = time.monotonic()
                    progress(f"reading the checkpoint ({done} of {len(shards)} shards)")


def _fill_shard(indexed: IndexedShard, states: dict[str, object], saved: FullState) -> None:
    kinds = saved.kinds(indexed.name)
    for kind, slot in indexed.shard.slots(states).items():
        if kind not in kinds:
            continue
        live = slot.live
        # reads straight into memory, without a temporary tensor
        if indexed.cut is None and live.is_cpu and live.is_contiguous():
            saved.fill(indexed.name, kind, live.view(-1), slot.start)
            continue
        if indexed.cut is None:
            stretch = saved.read_flat(indexed.name, kind, slot.start, slot.numel)
        else:
            stretch = indexed.cut.take(saved.read(indexed.name, kind)).reshape(-1)[slot.start : slot.start + slot.numel]
        live.copy_(stretch.view(live.shape))


def _set_counters(engine: Engine, counters: dict[str, Any]) -> None:
    engine.global_steps = counters["global_steps"]
    engine.skipped_steps = counters["skipped_steps"]
    engine.global_samples = counters["global_samples"]
    scaler = loss_scaler(engine)
    saved = counters["loss_scaler"] or {}  # its settings are those of this run
    for key in SCALER:
        if scaler is not None and key in saved and hasattr(scaler, key):
            setattr(scaler, key, saved[key])
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return
    schedule = counters["lr_scheduler"]  # DeepSpeed's own schedulers count from -1
    done = schedule.get("last_batch_iteration", schedule.get("last_epoch", 0) - 1) + 1
    if hasattr(scheduler, "last_batch_iteration"):
        if done:
            scheduler.step(done - 1)
    elif isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = done, done + 1
        _set_rates(scheduler)
    else:
        for _ in range(done):
            scheduler.step()


def _set_rates(scheduler: LambdaLR) -> None:
    curves = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * curve(scheduler.last_epoch) for base, curve in curves]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
    scheduler._last_lr = rates


def _error(kind: str, message: str) -> UserError:
    hint = "resume in the layout of the checkpoint, or use another checkpoint"
    return UserError(Problem(kind=kind, message=message, hint=hint, where="--resume"))
