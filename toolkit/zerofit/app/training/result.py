"""The result of a training, as ranks wrote it into the run folder."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.spec.foreign import read_json, refused
from zerofit.spec.run_folder import Job, RunFolder


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training.

    >>> result = TrainingResult.of(RunFolder(Path("runs/lenet")), {"steps": 30, "samples": 480, "tokens": None,
    ...     "train_loss": 0.31, "eval": {"loss": 0.29, "accuracy": 0.98}, "samples_per_s": 2100.0,
    ...     "tokens_per_s": None, "world_size": 2, "layout": {"dp": 2, "zero_stage": 2}, "resumed_from": None})
    >>> result.eval["accuracy"], result.to_dict()["run_dir"]
    (0.98, 'runs/lenet')
    """

    run_dir: str  # the run folder
    steps: int  # total optimizer steps
    samples: int
    tokens: int | None  # None for images
    train_loss: float  # of the last step
    eval: Mapping[str, float]  # loss, and accuracy (images) or perplexity (text), over the validation samples
    samples_per_s: float
    tokens_per_s: float | None
    world_size: int
    layout: Mapping[str, int]  # dp, tp, pp, sp, zero_stage
    resumed_from: str | None  # the checkpoint that the last start resumed from
    unigram_entropy_nats: float | None = None  # loss of a model that predicts by token frequency alone
    sample: str | None = None  # text from the trained language model
    stages: Sequence[Mapping[str, Any]] = ()  # pipelines only: stage, its ranks, its layers, parameters
    conversations: Mapping[str, int] | None = None  # all, truncated, left out, their tokens
    # name in metrics.jsonl -> measured, forecast (None: unknown) and difference as a share of the forecast
    against_forecast: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: RunFolder, values: Mapping[str, Any]) -> TrainingResult:
        """Return the result that rank 0 wrote into the run folder."""
        return cls(run_dir=str(folder.path), **values)

    def to_dict(self) -> dict[str, Any]:
        """Return the data that `zerofit train --json` prints."""
        values = asdict(self)
        for name in ("sample", "stages"):
            if not values[name]:
                del values[name]
        return values

    def plot(self, path: str | Path) -> Path:
        """Draw loss, throughput and memory of the run; return the picture's path."""
        from zerofit.report.plot import draw

        draw([Path(self.run_dir)], Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        """Show the figures as a table in a notebook."""
        values = {"run folder": self.run_dir, "steps": self.steps, "training loss": f"{self.train_loss:.4f}"}
        values |= {f"validation {name}": f"{value:.4f}" for name, value in self.eval.items()}
        rows = (f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
        return f"<table>{''.join(rows)}</table>"


def finished_before(job: Job, folder: RunFolder) -> TrainingResult | None:
    """Return the result of a run that is already complete, with its last step and model saved, else None."""
    if job.start is None or job.start.step < job.steps or not folder.result.exists() or not folder.model.exists():
        return None
    with refused(folder.result):
        return TrainingResult.of(folder, read_json(folder.result))
