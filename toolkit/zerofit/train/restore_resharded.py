"""Filling a freshly built engine from a checkpoint of any layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from zerofit.checkpoint.full_state import MASTER, FullState
from zerofit.spec.errors import Problem, UserError
from zerofit.train.loop import EngineTrainer
from zerofit.train.param_shards import Unsupported
from zerofit.train.shard_index import IndexedShard, engines, loss_scaler, names_of, persistent_buffers, pieces
from zerofit.train.zero3_layout import in_memory
from zerofit.train.zero_layouts import inner_optimizer, to_training_precision

WORD_S = 2.0


def restore(driver: EngineTrainer, whole_by_engine: dict[str, FullState], progress: Callable[[str], None]) -> None:
    """Put weights, optimizer states, counters and schedule of a checkpoint into the driver's engines.

    Each rank reads what its own partitions need, one parameter at a time. All ranks call this. Raises UserError where
    the checkpoint lacks a parameter or has it in another shape, or where the engine cannot be filled.
    """
    for tag, engine in engines(driver).items():
        whole = whole_by_engine[tag]
        try:
            found = list(pieces(driver, engine, tag))
        except Unsupported as reason:
            raise _error(
                "no-restore", f"the new layout cannot take over a checkpoint of another one: {reason}"
            ) from None
        _refuse_other_model(found, whole)
        if hasattr(engine.optimizer, "checkpoint_event_prologue"):
            engine.optimizer.checkpoint_event_prologue()
        _fill(engine, found, whole, progress)
        to_training_precision(engine)
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        _set_counters(engine, whole.counters)
        _fill_buffers(driver, engine, whole)


def _refuse_other_model(found: list[IndexedShard], whole: FullState) -> None:
    known = {*whole.names, *whole.ties}
    missing = sorted({p.name for p in found} - known)
    other = sorted({p.name for p in found if p.name in known and whole.shape(p.name) != p.shape})
    if missing:
        raise _error(
            "other-model", f"the checkpoint lacks {len(missing)} parameters of the model, {missing[0]} the first"
        )
    if other:
        shape = next(p.shape for p in found if p.name == other[0])
        message = f"{other[0]} has shape {whole.shape(other[0])} in the checkpoint and {shape} in the model"
        raise _error("other-model", message)


def _make_states(inner: Any, piece: IndexedShard, whole: FullState) -> None:
    """Zeros for the states that the checkpoint has: optimizers would make them at their first step."""
    if piece.held.states_at is None:
        return
    states = inner.state[piece.held.master]
    for kind in whole.kinds(piece.name):
        if kind != MASTER and kind not in states:
            states[kind] = _zeros(inner, piece, kind)
    if whole.counters["step"] is not None and set(states) - {"momentum_buffer"}:
        states["step"] = _step(inner, whole.counters["step"], piece.held.master)


def _zeros(inner: Any, piece: IndexedShard, kind: str) -> Tensor:
    master = piece.held.master
    if kind == "momentum_buffer" and piece.held.uncut is not None:
        return torch.zeros(piece.held.uncut[1], dtype=master.dtype, device=master.device)
    wider = getattr(inner, "fp32_optimizer_states", False)  # DeepSpeedCPUAdam, whatever the master weights are
    return torch.zeros_like(master, dtype=torch.float32 if wider else master.dtype, requires_grad=False)


def _step(inner: Any, step: int, master: Tensor) -> Any:
    """The step count in the form that this optimizer counts in."""
    counting = getattr(inner, "aux_optimizer", None) or inner  # Muon leaves all but matrices to an Adam
    if not type(counting).__module__.startswith("torch.optim"):
        return step
    on_device = any(group.get("fused") or group.get("capturable") for group in counting.param_groups)
    return torch.tensor(float(step), device=master.device if on_device else "cpu")


@torch.no_grad()
def _fill(engine: Any, found: list[IndexedShard], whole: FullState, progress: Callable[[str], None]) -> None:
    inner, done, said = inner_optimizer(engine), 0, time.monotonic()
    for _, group in groupby(found, key=lambda piece: id(piece.held.master)):
        mine = list(group)
        with in_memory(engine, mine[0].held.master):
            for piece in mine:
                _make_states(inner, piece, whole)
            for piece in mine:
                _fill_piece(piece, inner.state.get(piece.held.master, {}), whole)
                done += 1
                if time.monotonic() - said > WORD_S:
                    said = time.monotonic()
                    progress(f"reading the checkpoint ({done} of {len(found)} pieces)")


def _fill_piece(piece: IndexedShard, states: dict[str, Any], whole: FullState) -> None:
    kinds = whole.kinds(piece.name)
    for kind, slot in piece.held.slots(states).items():
        if kind in kinds:
            live = slot.live
            live.copy_(_stretch(whole, piece, kind, slot.start, slot.numel).view(live.shape))


def _stretch(whole: FullState, piece: IndexedShard, kind: str, start: int, numel: int) -> Tensor:
    """float32 (numel,) of this rank's share of a parameter."""
    if piece.cut is None:
        return whole.read_flat(piece.name, kind, start, numel)
    return piece.cut.take(whole.read(piece.name, kind)).reshape(-1)[start : start + numel]


def _set_counters(engine: Any, counters: dict[str, Any]) -> None:
    engine.global_steps = counters["global_steps"]
    engine.skipped_steps = counters["skipped_steps"]
    engine.global_samples = counters["global_samples"]
    scaler = loss_scaler(engine)
    for key, value in (counters["loss_scaler"] or {}).items():
        if scaler is not None and hasattr(scaler, key):
            setattr(scaler, key, value)
    if engine.lr_scheduler is not None:
        _set_schedule(engine.lr_scheduler, counters["lr_scheduler"])


def _set_schedule(scheduler: Any, saved: dict[str, Any]) -> None:
    """The learning rate that this run's own curve has after the steps that were done."""
    done = saved.get("last_batch_iteration", saved.get("last_epoch", 0) - 1) + 1  # DeepSpeed's own count from -1
    if hasattr(scheduler, "last_batch_iteration"):
        if done:
            scheduler.step(done - 1)
        return
    if not isinstance(scheduler, LambdaLR):
        for _ in range(done):
            scheduler.step()
        return
    scheduler.last_epoch, scheduler._step_count = done, done + 1
    rates = [base * curve(done) for base, curve in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _fill_buffers(driver: EngineTrainer, engine: Any, whole: FullState) -> None:
    names, saved = names_of(driver, engine).buffers, set(whole.buffers)
    with torch.no_grad():
        for _, buffer in persistent_buffers(engine.module):
            if names[id(buffer)] in saved:
                buffer.copy_(whole.buffer(names[id(buffer)]))


def _error(kind: str, message: str) -> UserError:
    hint = "go on in the layout of the checkpoint, or take another checkpoint"
    return UserError(Problem(kind=kind, message=message, hint=hint, where="--resume"))
