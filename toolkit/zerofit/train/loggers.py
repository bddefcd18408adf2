"""Where records go: metrics.jsonl, events.jsonl, TensorBoard, Weights & Biases. Each is a callback."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.callbacks import Callback, SavedCheckpoint, StepRecord
from zerofit.train.heartbeat import TRAINING, RankProgress


class JsonLines(Callback):
    """metrics.jsonl: one JSON object a step; each line is written before the next one starts."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def on_step(self, record: StepRecord) -> None:
        """Append one step's record."""
        self._file.write(json.dumps(record) + "\n")


class EventLog(Callback):
    """events.jsonl: phases, evaluations and checkpoints, for the live view and `zerofit plot`; and the rank's phase."""

    def __init__(self, path: Path | None, progress: RankProgress):
        """`path`: None on ranks other than 0, which write nothing."""
        self._file = path.open("a", buffering=1, encoding="utf-8") if path else None
        self._progress = progress

    def phase(self, text: str) -> None:
        """Note what the run does now."""
        self._progress.phase = text
        self._write("phase", text=text)

    def training(self, **steps: int) -> None:
        """Note that training begins or goes on; `steps` in all and, at the start, those `done`."""
        self._progress.phase = TRAINING
        self._write("training", **steps)

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Note the figures; training goes on."""
        self._progress.phase = TRAINING
        self._write("eval", step=step, **figures)

    def on_save(self, checkpoint: SavedCheckpoint) -> None:
        """Note a checkpoint that is visible."""
        self._write("saved", step=checkpoint.step, save_s=checkpoint.save_s, stalled_s=checkpoint.stalled_s)

    def save_failed(self, step: int, text: str) -> None:
        """Note a checkpoint that could not be saved, and why."""
        self._write("save-failed", step=step, text=text)

    def _write(self, event: str, **values: Any) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, "time_s": time.time(), **values}) + "\n")


class TensorBoard(Callback):
    """TensorBoard's event files, in the run folder."""

    def __init__(self, path: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), flush_secs=5)

    def on_step(self, record: StepRecord) -> None:
        """Write all numbers of a step."""
        self._add("train", record["step"], record)

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of an evaluation."""
        self._add("valid", step, figures)

    def _add(self, part: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"{part}/{name}", value, step)


class WeightsAndBiases(Callback):
    """A run in a Weights & Biases project."""

    def __init__(self, job: Job, folder: RunFolder):
        import wandb

        self._run = wandb.init(project=job.run.wandb, dir=str(folder.path), config=job.run.model_dump(mode="json"))

    def on_step(self, record: StepRecord) -> None:
        """Log all numbers of a step."""
        self._log("train", record["step"], record)

    def on_evaluate(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of an evaluation."""
        self._log("valid", step, figures)

    def _log(self, part: str, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({f"{part}/{k}": v for k, v in values.items() if k != "step" and v is not None}, step=step)


def make_loggers(job: Job, folder: RunFolder) -> list[Callback]:
    """Return the loggers of steps that the run asks for."""
    loggers: list[Callback] = [JsonLines(folder.metrics)]
    if job.run.tensorboard:
        loggers.append(TensorBoard(folder.tensorboard))
    if job.run.wandb:
        loggers.append(WeightsAndBiases(job, folder))
    return loggers
