"""Going on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.compatible import piece_by_piece
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.store import Manifest, read_manifest
from zerofit.spec.run_folder import Start
from zerofit.train import rank_state
from zerofit.train.checkpoint_engine import SyncedCheckpointEngine
from zerofit.train.loop import EngineTrainer
from zerofit.train.restore_resharded import restore
from zerofit.train.shard_index import engines

KEPT = ("params", "lr", "initial_lr", "step")  # what an optimizer's groups take from the checkpoint


def resume(driver: EngineTrainer, start: Start, progress: Callable[[str], None]) -> Manifest:
    """Put the state that a checkpoint holds into freshly built engines; the checkpoint's manifest.

    In the layout that wrote it every random state goes on too, so that the training is the uninterrupted one bit for
    bit. In another one DeepSpeed cannot read the files (and with some settings not in the same one either); the pieces
    are then taken out of them one by one.
    """
    checkpoint = Path(start.checkpoint)
    asked = {tag: _RunSettings(engine) for tag, engine in engines(driver).items()}
    if start.same_layout and not piece_by_piece(driver.job.ds_config):
        _load(driver, checkpoint)
    else:
        restore(driver, {tag: FullState(checkpoint, {tag: ""}) for tag in asked}, progress)
    if start.same_layout:
        state = safe_load.load(checkpoint / "ranks" / f"rank-{dist.get_rank():05}.pt", mmap=False)
        rank_state.give_back(driver, state)
    for one in asked.values():
        one.give_back()
    dist.barrier()
    return read_manifest(checkpoint)


def _load(driver: EngineTrainer, checkpoint: Path) -> None:
    for tag, engine in engines(driver).items():
        if not isinstance(engine.checkpoint_engine, SyncedCheckpointEngine):
            engine.checkpoint_engine = SyncedCheckpointEngine(driver.job.layout.zero_stage)
        path, _ = engine.load_checkpoint(str(checkpoint), tag=tag)
        assert path is not None, f"DeepSpeed finds no checkpoint in {checkpoint}, though it was verified"


class _RunSettings:
    """What this start asks of an optimizer, which loading a checkpoint would silently put back: lr, decay, betas."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._groups = [{k: v for k, v in group.items() if k not in KEPT} for group in self._groups_now()]
        scheduler = engine.lr_scheduler
        self._base = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else None

    def give_back(self) -> None:
        for group, asked in zip(self._groups_now(), self._groups, strict=True):
            group.update(asked)
        scheduler = self._engine.lr_scheduler
        if self._base is not None:
            scheduler.base_lrs = self._base
            rates = [
                base * curve(scheduler.last_epoch) for base, curve in zip(self._base, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate, base in zip(scheduler.optimizer.param_groups, rates, self._base, strict=True):
                group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
                group["initial_lr"] = base
            scheduler._last_lr = rates

    def _groups_now(self) -> list[dict[str, Any]]:
        return self._engine.optimizer.param_groups
