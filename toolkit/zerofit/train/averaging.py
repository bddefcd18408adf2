"""Average the weights over the steps (`--ema`). Each rank averages the weights that its optimizer updates.

The average is torch's (torch.optim.swa_utils, with buffers): it starts with the first step's weights, then becomes
decay x average + (1 - decay) x weights after each step. A rank needs one float32 number for each weight that it
updates. At ZeRO 1 to 3 these weights are a share of the model.
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


# Averages are kept for the stretches of weights that this rank's optimizer updates, in float32, beside the masters:
#
#     average <- decay * average + (1 - decay) * weights     after each step, decay as in torch.optim.swa_utils
#
# To evaluate or save them, they are swapped with the masters, and the engine then copies masters to its low-precision
# weights as after a step. So no second copy of the model is needed in any layout.
class AveragedWeights:
    """Running average of the weights that one rank's optimizer updates, and of floating-point buffers."""

    def __init__(self, trainer: EngineTrainer, decay: float):
        self._trainer, self._average = trainer, get_ema_multi_avg_fn(decay)
        self._shards: list[IndexedShard] | None = None  # looked up at the first step, after a checkpoint was loaded
        self.tensors: list[Tensor] = []  # averages of the shards, then of the buffers
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights after a step."""
        live = self._live()
        if not self.tensors:
            self.tensors = [torch.empty_like(current).copy_(current) for current in live]
        elif self._steps:
            self._average(self.tensors, live, self._steps)
        else:
            for average, current in zip(self.tensors, live, strict=True):
                average.copy_(current)
        self._steps += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside this context, the model has the averages. At the end its weights are restored bit for bit.

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

    def state(self) -> dict[str, Any]:
        """Return this rank's averages for a checkpoint: parts of weights (with name and start), and buffers."""
        shards = self._found()
        places = [{"name": indexed.name, "start": indexed.shard.start} for indexed in shards]
        averages, buffers = self.tensors[: len(shards)], self.tensors[len(shards) :]
        return {"steps": self._steps, "places": places, "averages": averages, "buffers": buffers}

    @torch.no_grad()
    def restore(self, checkpoint: Path, own_rank: int | None) -> None:
        """Restore averages from `checkpoint`. If it has no averages, they start at the next step.

        `own_rank`: read only this rank's file, since the layout is the same; None: read the files of all ranks.
        """
        pattern = "rank-*.pt" if own_rank is None else f"rank-{own_rank:05}.pt"
        files = sorted((checkpoint / "ranks").glob(pattern))
        states = [state for file in files if (state := safe_load.load(file).get("averages"))]
        if not states:
            return
        live = self._live()
        self.tensors, self._steps = [tensor.clone() for tensor in live], states[0]["steps"]
        shards = self._found()
        for average, indexed in zip(self.tensors, shards, strict=False):
            flat, first = average.view(-1), indexed.shard.start
            for place, values in _stretches(states, indexed.name):
                start, stop = max(first, place), min(first + len(flat), place + len(values))
                if start < stop:
                    flat[start - first : stop - first] = values[start - place : stop - place].to(flat.device)
        for n, average in enumerate(self.tensors[len(shards) :]):  # each rank of the old layout has saved all buffers
            average.copy_(torch.stack([state["buffers"][n] for state in states]).mean(0))

    def _found(self) -> list[IndexedShard]:
        if self._shards is None:
            shards = indexed_shards(self._trainer, self._trainer.engine, "state")
            self._shards = [indexed for indexed in shards if indexed.shard.states_at is not None]
        return self._shards

    def _live(self) -> list[Tensor]:
        stretches = [indexed.shard.slots({})[MASTER].live for indexed in self._found()]
        buffers = [buffer for _, buffer in persistent_buffers(self._trainer.module) if buffer.is_floating_point()]
        return [*stretches, *buffers]

    @torch.no_grad()
    def _exchange(self) -> None:
        engine: Any = self._trainer.engine
        # As in a load: DeepSpeed must partition parameters before masters change, and gather persistent ones
        # afterwards.
        partitioned = hasattr(engine.optimizer, "checkpoint_event_prologue")
        if partitioned:
            engine.optimizer.checkpoint_event_prologue()
        for average, live in zip(self.tensors, self._live(), strict=True):
            weights = live.clone()
            live.copy_(average)
            average.copy_(weights)
        to_training_precision(engine)
        if partitioned:
            engine.optimizer.checkpoint_event_epilogue()


def _stretches(states: list[dict[str, Any]], name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield each saved part of the parameter `name`: the part's start in the parameter, and its flat values."""
    for state in states:
        for place, values in zip(state["places"], state["averages"], strict=True):
            if place["name"] == name:
                yield place["start"], values.view(-1)
