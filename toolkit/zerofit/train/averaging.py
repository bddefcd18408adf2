"""Weights averaged over the steps (`--ema`), each rank the stretches that its optimizer steps on.

The average is torch's own (torch.optim.swa_utils, with buffers): the first step's weights, then decay x average +
(1 - decay) x weights after each step. It takes float32 of what a rank steps on: at ZeRO 1 to 3 a share of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.full_state import MASTER
from zerofit.train.shard_index import IndexedShard, indexed_shards
from zerofit.train.trainer import EngineTrainer, persistent_buffers
from zerofit.train.zero_layouts import to_training_precision


class AveragedWeights:
    """The running average of one rank's stretches of weights, and of its floating-point buffers."""

    def __init__(self, trainer: EngineTrainer, decay: float):
        self._trainer, self._average = trainer, get_ema_multi_avg_fn(decay)
        self._shards: list[IndexedShard] | None = None  # found at the first step: loading a checkpoint comes before
        self.tensors: list[Tensor] = []  # averages of the shards, then of the buffers
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        live = self._live()
        if not self.tensors:
            self.tensors = [torch.empty_like(one).copy_(one) for one in live]
        elif self._steps:
            self._average(self.tensors, live, self._steps)
        else:
            for mine, one in zip(self.tensors, live, strict=True):
                mine.copy_(one)
        self._steps += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the averages in the model, in place of its weights; afterwards these stand there again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank: each stretch by name and place, and buffers."""
        shards = self._found()
        places = [{"name": one.name, "start": one.shard.start} for one in shards]
        averages, buffers = self.tensors[: len(shards)], self.tensors[len(shards) :]
        return {"steps": self._steps, "places": places, "averages": averages, "buffers": buffers}

    @torch.no_grad()
    def restore(self, checkpoint: Path, own_rank: int | None) -> None:
        """Take up the averages of a checkpoint: this rank's of the same layout, else what lies in all ranks' files.

        A checkpoint of a run without averages has none: they begin with the next step.
        """
        pattern = "rank-*.pt" if own_rank is None else f"rank-{own_rank:05}.pt"
        files = sorted((checkpoint / "ranks").glob(pattern))
        states = [state for file in files if (state := safe_load.load(file).get("averages"))]
        if not states:
            return
        live = self._live()
        self.tensors, self._steps = [one.clone() for one in live], states[0]["steps"]
        shards = self._found()
        for mine, one in zip(self.tensors, shards, strict=False):
            flat, first = mine.view(-1), one.shard.start
            for place, values in _stretches(states, one.name):
                start, stop = max(first, place), min(first + len(flat), place + len(values))
                if start < stop:
                    flat[start - first : stop - first] = values[start - place : stop - place].to(flat.device)
        for n, mine in enumerate(self.tensors[len(shards) :]):  # ranks that are no more have left one each
            mine.copy_(torch.stack([state["buffers"][n] for state in states]).mean(0))

    def _found(self) -> list[IndexedShard]:
        if self._shards is None:
            found = indexed_shards(self._trainer, self._trainer.engine, "state")
            self._shards = [one for one in found if one.shard.states_at is not None]
        return self._shards

    def _live(self) -> list[Tensor]:
        stretches = [one.shard.slots({})[MASTER].live for one in self._found()]
        buffers = [buffer for _, buffer in persistent_buffers(self._trainer.module) if buffer.is_floating_point()]
        return [*stretches, *buffers]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Put averages where weights are, and weights where averages are, one stretch at a time."""
        engine: Any = self._trainer.engine
        partitioned = hasattr(engine.optimizer, "checkpoint_event_prologue")
        if partitioned:
            engine.optimizer.checkpoint_event_prologue()
        for mine, one in zip(self.tensors, self._live(), strict=True):
            weights = one.clone()
            one.copy_(mine)
            mine.copy_(weights)
        to_training_precision(engine)
        if partitioned:
            engine.optimizer.checkpoint_event_epilogue()


def _stretches(states: list[dict[str, Any]], name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield where each stretch of a parameter begins, and its flat values."""
    for state in states:
        for place, values in zip(state["places"], state["averages"], strict=True):
            if place["name"] == name:
                yield place["start"], values.view(-1)
