"""The result of a training that came to its end."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofit.spec.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training has come to.

    >>> result = TrainingResult.of(RunFolder(Path("runs/lenet")), {"steps": 30, "samples": 480, "tokens": None,
    ...     "train_loss": 0.31, "eval": {"loss": 0.29, "accuracy": 0.98}, "samples_per_s": 2100.0,
    ...     "tokens_per_s": None, "world_size": 2, "layout": {"dp": 2, "zero_stage": 2}, "resumed_from": None})
    >>> result.eval["accuracy"], result.to_dict()["run_dir"]
    (0.98, 'runs/lenet')
    """

    run_dir: str  # the run folder
    steps: int  # optimizer steps in all
    samples: int
    tokens: int | None  # None for images
    train_loss: float  # of the last step
    eval: Mapping[str, float]  # loss, and accuracy (images) or perplexity (text), over the validation samples
    samples_per_s: float
    tokens_per_s: float | None
    world_size: int
    layout: Mapping[str, int]  # dp, tp, pp, sp, zero_stage
    resumed_from: str | None  # the checkpoint from which the last start went on
    unigram_entropy_nats: float | None = None  # loss of a model that only knows how often each token occurs
    sample: str | None = None  # what a language model writes

    @classmethod
    def of(cls, folder: RunFolder, values: Mapping[str, Any]) -> TrainingResult:
        """Return the result that rank 0 wrote into the run folder."""
        return cls(run_dir=str(folder.path), **values)

    @classmethod
    def read(cls, folder: RunFolder) -> TrainingResult:
        """Read the result in a run folder."""
        return cls.of(folder, json.loads(folder.result.read_text(encoding="utf-8")))

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit train --json` prints."""
        values = asdict(self)
        if self.sample is None:
            del values["sample"]
        return values

    def plot(self, path: str | Path) -> Path:
        """Draw loss, throughput and memory of the run into a picture; return its path."""
        from zerofit.report.plot import draw

        draw([Path(self.run_dir)], Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        """Show the figures as a table in a notebook."""
        values = {"run folder": self.run_dir, "steps": self.steps, "training loss": f"{self.train_loss:.4f}"}
        values |= {f"validation {name}": f"{value:.4f}" for name, value in self.eval.items()}
        rows = (f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
        return f"<table>{''.join(rows)}</table>"
