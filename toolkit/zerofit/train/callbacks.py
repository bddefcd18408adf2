"""Define the callbacks that a run calls while it trains, and the loggers that use them.

Metrics files, TensorBoard, Weights & Biases, users and benchmarks all use this interface.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from zerofit.spec.errors import Problems
from zerofit.spec.files import open_jsonl
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.spec.stages import PipelineStage
from zerofit.train.heartbeat import TRAINING, RankProgress


class MeasuredMemory(TypedDict):
    """Peak bytes so far on the device and on the host, each for the rank that uses the most."""

    memory_bytes: int  # tensors on the device; on CPUs `host_bytes`
    reserved_bytes: int | None  # reserved on the device by torch's allocator; None on CPUs
    outside_bytes: int | None  # on the device outside torch since the forecast; None on CPUs or without a forecast
    host_bytes: int  # resident in the process, without the pages of data files; on CPUs without any file's pages
    shared_bytes: int  # host memory now pinned or shared with data loader processes


# Keys of metrics.jsonl are an interface: `zerofit plot`, the live view and users' scripts read them.
class StepRecord(MeasuredMemory):
    """One line of metrics.jsonl: an optimizer step."""

    step: int  # 1-based
    samples: int  # consumed so far
    loss: float  # mean over all ranks
    lr: float
    grad_norm: float | None  # before clipping; None if the engine has none or fp16 overflowed
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None  # None without text
    mfu: float | None  # model FLOPs per second over the devices' peak; None if unknown
    forecast_bytes: float | None  # for reserved_bytes, on CPUs for memory_bytes; None without a forecast
    forecast_host_bytes: float | None  # also None on CPUs
    loss_d: NotRequired[float]  # a GAN's discriminator and generator
    loss_g: NotRequired[float]
    loss_scale: NotRequired[float]  # fp16 only
    skipped_steps: NotRequired[float]
    router_loss: NotRequired[float]  # load-balancing part of the loss of a mixture of experts
    expert_load_most: NotRequired[float]  # tokens of the busiest expert in any layer, divided by an even share
    expert_load_least: NotRequired[float]  # the same for the least busy expert
    truncated: NotRequired[int]  # training conversations cut to the length of a sample
    dropped: NotRequired[int]  # training conversations left out


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint, under its final name."""

    step: int  # optimizer steps done
    path: Path
    save_s: float  # until it was visible
    stalled_s: float  # training waited this long


class Callback:
    """Base class of objects that a run calls while it trains.

    Override the methods that you need. All methods of this class do nothing.

    >>> class Print(Callback):
    ...     def on_step(self, record: StepRecord) -> None:
    ...         print(record["step"], record["loss"])

    Callbacks that a run names (`callbacks: [package.module:Class]`) are constructed without arguments and called on
    rank 0 only, so they must not communicate with other ranks. An exception in a callback ends the run.
    """

    def on_step_begin(self, step: int) -> None:
        """Called before step `step` (0-based). The step's time does not include this call."""

    def on_step(self, record: StepRecord) -> None:
        """Called for each step in order, up to half a second late.

        Ranks exchange losses in blocks of steps.
        """

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Called after an evaluation, when `step` steps are done.

        `figures`: loss, and accuracy or perplexity.
        """

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        """Called on rank 0 when a checkpoint becomes visible.

        With `save_async` the thread that wrote the checkpoint calls this method.
        """


def overridden(callbacks: Sequence[Callback], method: str) -> list[Callable[..., None]]:
    """Return the method `method` of each callback that overrides it. Others cost no time."""
    inherited = getattr(Callback, method)
    return [getattr(callback, method) for callback in callbacks if getattr(type(callback), method) is not inherited]


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Construct the callbacks that a run names. Their modules may be in the current folder.

    Raises UserError with every name that cannot be imported or is not a Callback.
    """
    # ranks run with PYTHONSAFEPATH, which leaves the current folder out; appended, it hides no installed module
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    problems, callbacks = Problems(), []
    hint = "name a class derived from zerofit.train.callbacks.Callback, as package.module:Class"
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            callback: object = getattr(importlib.import_module(module), attribute)()
        except Exception as error:  # a user's own module can raise anything
            problems.add("callback", f"{name} cannot be loaded: {type(error).__name__}: {error}", hint, "--callbacks")
            continue
        if isinstance(callback, Callback):
            callbacks.append(callback)
        else:
            problems.add("callback", f"{name} is a {type(callback).__name__}, not a Callback", hint, "--callbacks")
    problems.raise_if_any()
    return callbacks


class JsonLines(Callback):
    """Writes metrics.jsonl: one JSON object per step."""

    def __init__(self, path: Path):
        self._file = open_jsonl(path)

    def on_step(self, record: StepRecord) -> None:
        """Append one step's record."""
        self._file.write(json.dumps(record) + "\n")


class EventLog(Callback):
    """Writes events.jsonl for the live view and `zerofit plot`, and tells the heartbeat phases."""

    def __init__(self, path: Path | None, progress: RankProgress):
        """Append to `path`. Ranks other than 0 pass None and write nothing."""
        self._file = open_jsonl(path) if path else None
        self._progress = progress

    def phase(self, text: str) -> None:
        """Record the current phase of the run."""
        self._progress.begin(text)
        self._write("phase", text=text)

    def training(self, **steps: int) -> None:
        """Record that training begins or continues.

        Keyword arguments go into the entry. `steps`: the total number of steps. `done`: the number of earlier steps,
        only when a run starts.
        """
        self._progress.begin(TRAINING)
        self._write("training", **steps)

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures, and that training continues."""
        self._progress.begin(TRAINING)
        self._write("eval", step=step, **figures)

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        """Record that a checkpoint is complete."""
        self._write("saved", step=checkpoint.step, save_s=checkpoint.save_s, stalled_s=checkpoint.stalled_s)

    def note(self, text: str) -> None:
        """Record a decision of zerofit, for the user."""
        self._write("note", text=text)

    def stages(self, stages: Sequence[PipelineStage]) -> None:
        """Record which layers of a pipeline are on which ranks."""
        self._write("stages", stages=[asdict(stage) for stage in stages])

    def warning(self, text: str) -> None:
        """Record a warning for the user."""
        self._write("warning", text=text)

    def save_failed(self, step: int, text: str) -> None:
        """Record a failed save and its reason."""
        self._write("save-failed", step=step, text=text)

    def _write(self, event: str, **values: object) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, "time_s": time.time(), **values}) + "\n")


class _NumberLogger(Callback, ABC):
    """Logs all numbers of steps and evaluations, under `train/` and `valid/`."""

    @abstractmethod
    def _log(self, values: dict[str, object], step: int) -> None: ...

    def on_step(self, record: StepRecord) -> None:
        self._add("train", record["step"], record)

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        self._add("valid", step, figures)

    def _add(self, part: str, step: int, values: Mapping[str, object]) -> None:
        # TensorBoard accepts only numbers, so a missing figure is left out
        self._log({f"{part}/{k}": v for k, v in values.items() if k != "step" and v is not None}, step)


class TensorBoard(_NumberLogger):
    """TensorBoard's event files, in the run folder."""

    def __init__(self, path: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), flush_secs=5)

    def _log(self, values: dict[str, object], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(_NumberLogger):
    """A run in a Weights & Biases project."""

    def __init__(self, job: Job, folder: RunFolder):
        import wandb

        self._run = wandb.init(project=job.run.wandb, dir=str(folder.path), config=job.run.model_dump(mode="json"))

    def _log(self, values: dict[str, object], step: int) -> None:
        self._run.log(values, step=step)


def make_loggers(job: Job, folder: RunFolder) -> list[Callback]:
    """Return the loggers that the run requests."""
    loggers: list[Callback] = [JsonLines(folder.metrics)]
    if job.run.tensorboard:
        loggers.append(TensorBoard(folder.tensorboard))
    if job.run.wandb:
        loggers.append(WeightsAndBiases(job, folder))
    return loggers
