"""Average the weights over the steps (`--ema`). Each rank averages its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.full_state import MASTER
from zerofit.train.shard_index import IndexedShard, indexed_shards
from zerofit.train.trainer import EngineTrainer, persistent_buffers
from zerofit.train.zero_layouts import partitioned, to_training_precision


class _SavedStart(TypedDict):
    """Which weights a saved average belongs to."""

    name: str  # of the parameter in the full model
    start: int  # of the average in the flattened parameter


class AverageState(TypedDict):
    """The averages of one rank in a checkpoint."""

    steps: int
    places: list[_SavedStart]  # one per average
    averages: list[Tensor]
    buffers: list[Tensor]


# The average is torch's (torch.optim.swa_utils, with buffers). It starts with the first step's weights. After each
# step:
#
#     average <- decay * average + (1 - decay) * weights
#
# A rank needs one float32 number for each weight that its optimizer updates: at ZeRO 1 to 3, for a share of the model.
# To evaluate or save the averages, they are swapped with the masters, and the engine then copies masters to its
# low-precision weights as after a step. So no second copy of the model is needed in any layout.
class AveragedWeights:
    """Running average of the weights that a rank's optimizer updates, and of its float buffers."""

    def __init__(self, trainer: EngineTrainer, decay: float):
        self._trainer, self._average = trainer, get_ema_multi_avg_fn(decay)
        self._shards: list[IndexedShard] | None = None  # looked up at the first step, after a checkpoint was loaded
        self.tensors: list[Tensor] = []  # averages of the shards, then of the buffers
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights after a step."""
        live = self._live()
        if self.tensors:
            self._average(self.tensors, live, self._steps)
        else:
            self.tensors = [current.clone() for current in live]
        self._steps += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages inside this context, and then its own weights, bit for bit.

        Before the first step there are no averages, and the weights stay.
        """
        if not self.tensors:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> AverageState:
        """Return this rank's averages for a checkpoint."""
        shards = self._trained_shards()
        places: list[_SavedStart] = [{"name": indexed.name, "start": indexed.shard.start} for indexed in shards]
        averages, buffers = self.tensors[: len(shards)], self.tensors[len(shards) :]
        return {"steps": self._steps, "places": places, "averages": averages, "buffers": buffers}

    @torch.no_grad()
    def restore(self, checkpoint: Path, own_rank: int | None) -> None:
        """Restore averages from `checkpoint`. If it has no averages, they start at the next step.

        `own_rank`: read only this rank's file, since the layout is the same; None: read the files of all ranks.
        """
        pattern = "rank-*.pt" if own_rank is None else f"rank-{own_rank:05}.pt"
        files = sorted((checkpoint / "ranks").glob(pattern))
        states: list[AverageState] = [state for file in files if (state := safe_load.load(file).get("averages"))]
        if not states:
            return
        live = self._live()
        self.tensors, self._steps = [tensor.clone() for tensor in live], states[0]["steps"]
        shards = self._trained_shards()
        # each part of the old layout is copied into the parts of this layout that it overlaps
        for average, indexed in zip(self.tensors, shards, strict=False):
            flat, first = average.view(-1), indexed.shard.start
            for begin, values in _saved_parts(states, indexed.name):
                start, stop = max(first, begin), min(first + len(flat), begin + len(values))
                if start < stop:
                    flat[start - first : stop - first] = values[start - begin : stop - begin].to(flat.device)
        for n, average in enumerate(self.tensors[len(shards) :]):  # each rank of the old layout has saved all buffers
            average.copy_(torch.stack([state["buffers"][n] for state in states]).mean(0))

    def _trained_shards(self) -> list[IndexedShard]:
        if self._shards is None:
            shards = indexed_shards(self._trainer, self._trainer.engine, "state")
            self._shards = [indexed for indexed in shards if indexed.shard.states_at is not None]
        return self._shards

    def _live(self) -> list[Tensor]:
        stretches = [indexed.shard.slots({})[MASTER].live for indexed in self._trained_shards()]
        buffers = [buffer for _, buffer in persistent_buffers(self._trainer.module) if buffer.is_floating_point()]
        return [*stretches, *buffers]

    @torch.no_grad()
    def _exchange(self) -> None:
        with partitioned(self._trainer.engine):
            for average, live in zip(self.tensors, self._live(), strict=True):
                weights = live.clone()
                live.copy_(average)
                average.copy_(weights)
            to_training_precision(self._trainer.engine)


def _saved_parts(states: list[AverageState], name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the start and the flat values of each saved part of the parameter `name`."""
    for state in states:
        for part, values in zip(state["places"], state["averages"], strict=True):
            if part["name"] == name:
                yield part["start"], values.view(-1)
