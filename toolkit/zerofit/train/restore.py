"""Resume from a checkpoint, with DeepSpeed if it can read the files, else shard by shard in any layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.compatible import piece_by_piece
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.index import MASTER, SCALER
from zerofit.checkpoint.store import is_own, read_manifest
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run_folder import Start
from zerofit.spec.units import counted
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine
from zerofit.train.frozen import refuse_other_frozen
from zerofit.train.shard_index import IndexedShard, indexed_shards
from zerofit.train.trainer import EngineTrainer, persistent_buffers
from zerofit.train.zero_layouts import Unsupported, in_memory, inner_optimizer, loss_scaler, to_training_precision

# Which way a checkpoint is read:
#
#     same layout           engine.load_checkpoint: each rank reads its own files; random states continue, bit for bit
#     any other layout,     build engines with fresh weights, then for each stretch that this rank updates: find its
#     or files that         name and place in the full model, read that part of the full tensor from the index of all
#     DeepSpeed misreads    ranks' files, and copy it into the optimizer's master and states
KEPT = ("params", "lr", "initial_lr", "step")  # keys of optimizer groups that come from the checkpoint
TELL_EVERY_S = 2.0


def resume(trainer: EngineTrainer, start: Start, progress: Callable[[str], None]) -> dict[str, Any]:
    """Load a checkpoint into freshly built engines. Return the figures of the checkpoint's last step.

    If the layout is the same, random states are restored, too, so training continues bit for bit. DeepSpeed cannot read
    files of a different layout, and with some settings it cannot read files of the same layout. In these cases zerofit
    reads the parameters' shards one by one.
    """
    checkpoint = Path(start.checkpoint)
    manifest = read_manifest(checkpoint) if is_own(checkpoint) else None  # None: of another program
    refuse_other_frozen(trainer, manifest and manifest.frozen)
    # noted before loading, which overwrites learning rate, weight decay and betas with the checkpoint's
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
    if start.same_layout:
        trainer.restore_rank_state(safe_load.load(checkpoint / "ranks" / f"rank-{dist.get_rank():05}.pt", mmap=False))
    if trainer.averaged:
        trainer.averaged.restore(checkpoint, dist.get_rank() if start.same_layout else None)
    for saved_settings in settings:
        saved_settings.put_back()
    dist.barrier()
    return manifest.figures if manifest else {}


class _RunSettings:
    """Optimizer settings of this start that a load would overwrite: learning rate, weight decay, betas."""

    def __init__(self, engine: Any):
        self._engine = engine
        groups: list[dict[str, Any]] = engine.optimizer.param_groups
        self._groups = [{k: v for k, v in group.items() if k not in KEPT} for group in groups]
        scheduler = engine.lr_scheduler
        self._base = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else None

    def put_back(self) -> None:
        for group, settings in zip(self._engine.optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        if self._base is not None:
            scheduler: LambdaLR = self._engine.lr_scheduler
            scheduler.base_lrs = self._base
            _set_rates(scheduler)
            for group, base in zip(scheduler.optimizer.param_groups, self._base, strict=True):
                group["initial_lr"] = base


def _restore_shards(
    trainer: EngineTrainer, engine: Any, tag: str, saved: FullState, progress: Callable[[str], None]
) -> None:
    """Load weights, optimizer states, counters and schedule into an engine from a checkpoint of any layout.

    Each rank reads only the data of its own partitions, one parameter at a time. Raises UserError if the checkpoint
    lacks a parameter or has it with a different shape, or if the engine's layout is not supported.
    """
    try:
        shards = list(indexed_shards(trainer, engine, tag))
    except Unsupported as reason:
        message = f"the new layout cannot load a checkpoint of another layout: {reason}"
        raise _error("no-restore", message) from None
    saved.match(dict.fromkeys(shard.name for shard in shards))
    _refuse_other_model(shards, saved)
    if hasattr(engine.optimizer, "checkpoint_event_prologue"):
        engine.optimizer.checkpoint_event_prologue()
    _fill(engine, shards, saved, progress)
    to_training_precision(engine)
    if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
        engine.optimizer.checkpoint_event_epilogue()
    _set_counters(engine, saved.counters)
    names, saved_buffers = trainer.state_names(engine).buffers, set(saved.buffers)
    with torch.no_grad():
        for _, buffer in persistent_buffers(engine.module):
            if names[id(buffer)] in saved_buffers:
                buffer.copy_(saved.buffer(names[id(buffer)]))


def _refuse_other_model(shards: list[IndexedShard], saved: FullState) -> None:
    known = {*saved.names, *saved.ties}
    missing = sorted({p.name for p in shards} - known)
    reshaped = sorted({p.name for p in shards if p.name in known and saved.shape(p.name) != p.shape})
    if missing:
        message = f"the checkpoint lacks {counted(len(missing), 'parameter')} of the model, for example {missing[0]}"
        raise _error("other-model", message)
    if reshaped:
        shape = next(p.shape for p in shards if p.name == reshaped[0])
        message = f"{reshaped[0]} has shape {saved.shape(reshaped[0])} in the checkpoint and {shape} in the model"
        raise _error("other-model", message)


def _make_states(inner: Any, indexed: IndexedShard, saved: FullState) -> None:
    """Allocate zeros for the states in the checkpoint. An optimizer would allocate them only at its first step."""
    if indexed.shard.states_at is None:
        return
    states = inner.state[indexed.shard.master]
    for kind in saved.kinds(indexed.name):
        if kind != MASTER and kind not in states:
            states[kind] = _zeros(inner, indexed, kind)
    if saved.counters["step"] is not None and set(states) - {"momentum_buffer"}:
        states["step"] = _step(inner, saved.counters["step"], indexed.shard.master)


def _zeros(inner: object, indexed: IndexedShard, kind: str) -> Tensor:
    master = indexed.shard.master
    if kind == "momentum_buffer" and indexed.shard.uncut is not None:
        return torch.zeros(indexed.shard.uncut[1], dtype=master.dtype, device=master.device)
    wider = getattr(inner, "fp32_optimizer_states", False)  # DeepSpeedCPUAdam, for masters of any precision
    return torch.zeros_like(master, dtype=torch.float32 if wider else master.dtype, requires_grad=False)


def _step(inner: Any, step: int, master: Tensor) -> Any:
    counting = getattr(inner, "aux_optimizer", None) or inner  # Muon updates only matrices; an Adam updates the rest
    if not type(counting).__module__.startswith("torch.optim"):
        return step
    on_device = any(group.get("fused") or group.get("capturable") for group in counting.param_groups)
    return torch.tensor(float(step), device=master.device if on_device else "cpu")


@torch.no_grad()
def _fill(engine: object, shards: list[IndexedShard], saved: FullState, progress: Callable[[str], None]) -> None:
    inner, done, reported = inner_optimizer(engine), 0, time.monotonic()
    for _, group in groupby(shards, key=lambda indexed: id(indexed.shard.master)):
        members = list(group)
        with in_memory(engine, members[0].shard.master):
            for indexed in members:
                _make_states(inner, indexed, saved)
            for indexed in members:
                _fill_shard(indexed, inner.state.get(indexed.shard.master, {}), saved)
                done += 1
                if time.monotonic() - reported > TELL_EVERY_S:
                    reported = time.monotonic()
                    progress(f"reading the checkpoint ({done} of {len(shards)} shards)")


def _fill_shard(indexed: IndexedShard, states: dict[str, object], saved: FullState) -> None:
    kinds = saved.kinds(indexed.name)
    for kind, slot in indexed.shard.slots(states).items():
        if kind not in kinds:
            continue
        live = slot.live
        if indexed.cut is None and live.is_cpu and live.is_contiguous():
            saved.fill(indexed.name, kind, live.view(-1), slot.start)
            continue
        if indexed.cut is None:
            stretch = saved.read_flat(indexed.name, kind, slot.start, slot.numel)
        else:
            stretch = indexed.cut.take(saved.read(indexed.name, kind)).reshape(-1)[slot.start : slot.start + slot.numel]
        live.copy_(stretch.view(live.shape))


def _set_counters(engine: Any, counters: dict[str, Any]) -> None:
    engine.global_steps = counters["global_steps"]
    engine.skipped_steps = counters["skipped_steps"]
    engine.global_samples = counters["global_samples"]
    scaler = loss_scaler(engine)
    saved = counters["loss_scaler"] or {}  # its settings are those of this run
    for key in SCALER:
        if scaler is not None and key in saved and hasattr(scaler, key):
            setattr(scaler, key, saved[key])
    if engine.lr_scheduler is not None:
        schedule = counters["lr_scheduler"]  # DeepSpeed's own schedulers count from -1
        done = schedule.get("last_batch_iteration", schedule.get("last_epoch", 0) - 1) + 1
        _set_steps_done(engine.lr_scheduler, done)


def _set_steps_done(scheduler: Any, done: int) -> None:
    if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, which count from -1
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
