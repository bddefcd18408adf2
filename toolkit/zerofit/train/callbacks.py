"""Callbacks: what is told of a run while it trains. Metrics files, users and benchmarks take part alike."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from zerofit.spec.errors import Problems


class StepRecord(TypedDict):
    """One line of metrics.jsonl: an optimizer step."""

    step: int  # 1-based
    samples: int  # consumed so far
    loss: float  # mean over all ranks
    lr: float
    grad_norm: float | None  # before clipping; None where the engine has none, or fp16 overflowed
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None  # of text
    mfu: float | None  # model FLOPs a second over the devices' peak, where both are known
    memory_bytes: int  # peak of this rank's device; on CPUs the process's memory
    host_bytes: int  # of this rank's process
    loss_d: NotRequired[float]  # of a GAN's two networks
    loss_g: NotRequired[float]
    loss_scale: NotRequired[float]  # of fp16
    skipped_steps: NotRequired[float]


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that has become visible."""

    step: int  # optimizer steps done
    path: Path
    save_s: float  # until it was visible
    stalled_s: float  # that training waited for it


class Callback:
    """What a run calls while it trains; nothing here does anything. Override what you need.

    >>> class Print(Callback):
    ...     def on_step(self, record: StepRecord) -> None:
    ...         print(record["step"], record["loss"])

    Callbacks that a run names (`callbacks: [package.module:Class]`) are made without arguments and called on rank 0
    alone, so that they must not communicate with other ranks. An exception in one ends the run.
    """

    def on_step_begin(self, step: int) -> None:
        """Called before step `step` (0-based); what it takes is not counted as the step's time."""

    def on_step(self, record: StepRecord) -> None:
        """Called for each step in order, up to half a second later: losses cross the ranks in blocks."""

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Called after an evaluation; `step` steps are done. Figures: loss, and accuracy or perplexity."""

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        """Called on rank 0 once a checkpoint is visible; with `save_async` from the thread that wrote it."""


def overridden(callbacks: Sequence[Callback], method: str) -> list[Callable[..., None]]:
    """Return the callbacks' own methods of this name, so that what nobody overrides costs nothing."""
    return [getattr(one, method) for one in callbacks if getattr(type(one), method) is not getattr(Callback, method)]


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that a run names; modules of the current folder can be named.

    Raises UserError with every name that cannot be imported or is not a Callback.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    problems, made = Problems(), []
    hint = "name a class derived from zerofit.train.callbacks.Callback, as package.module:Class"
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            one: Any = getattr(importlib.import_module(module), attribute)()
        except Exception as error:  # a user's own module can raise anything
            problems.add("callback", f"{name} cannot be made: {type(error).__name__}: {error}", hint, "--callbacks")
            continue
        if isinstance(one, Callback):
            made.append(one)
        else:
            problems.add("callback", f"{name} is a {type(one).__name__}, not a Callback", hint, "--callbacks")
    problems.raise_if_any()
    return made
