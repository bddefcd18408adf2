"""Where records go: metrics.jsonl, TensorBoard, Weights & Biases. Each is a callable that takes one record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.heartbeat import TRAINING, RankProgress

Sink = Callable[[dict[str, Any], str], None]  # a record and what it is of: "train" (a step) or "valid"


class JsonLines:
    """Appends one JSON object a line; each line is written before the next one starts. Evaluations are events."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __call__(self, record: dict[str, Any], part: str = "train") -> None:
        """Write one record of a step."""
        if part == "train":
            self._file.write(json.dumps(record) + "\n")


class Events:
    """What happens besides steps (phases, evaluations, notes), for the live view and for `zerofit plot`."""

    def __init__(self, path: Path | None):
        self._write = JsonLines(path) if path else None

    def __call__(self, event: str, **values: Any) -> None:
        """Note one event with the wall clock's time. Ranks other than 0 have no path and write nothing."""
        if event in ("phase", "training", "eval"):
            RankProgress.phase = values.get("text", TRAINING)
        if self._write:
            self._write({"event": event, "time_s": time.time(), **values})


def make_sinks(job: Job, folder: RunFolder) -> list[Sink]:
    """The sinks that the run asks for."""
    sinks: list[Sink] = [JsonLines(folder.metrics)]
    if job.run.tensorboard:
        sinks.append(_tensorboard(folder.tensorboard))
    if job.run.wandb:
        sinks.append(_wandb(job, folder))
    return sinks


def _tensorboard(path: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path), flush_secs=5)

    def write(record: dict[str, Any], part: str) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                writer.add_scalar(f"{part}/{name}", value, record["step"])

    return write


def _wandb(job: Job, folder: RunFolder) -> Sink:
    import wandb

    run = wandb.init(project=job.run.wandb, dir=str(folder.path), config=job.run.model_dump(mode="json"))

    def write(record: dict[str, Any], part: str) -> None:
        values = {f"{part}/{k}": v for k, v in record.items() if k != "step" and v is not None}
        run.log(values, step=record["step"])

    return write
