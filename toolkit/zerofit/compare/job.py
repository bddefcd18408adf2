"""What is compared: the same model, data, samples and optimizer for every strategy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerofit.spec.run import Run

MOMENTUM = 0.9
WARM = 3  # steps that are not timed: connections, caches


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """One measurement. Written as JSON for the processes that do it."""

    strategy: str
    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    data_root: str | None = None
    image_size: int | None = None
    seq_len: int | None = None
    tokenizer: str = "bytes"
    ranks: int = 2  # devices; a parameter server is a process more
    global_batch: int = 64  # samples of one optimizer step, over all ranks
    steps: int = 60
    lr: float = 0.02  # of SGD with momentum 0.9
    seed: int = 0
    eval_samples: int = 1000
    accelerator: str = "cpu"  # or "cuda"
    epochs: int = 0  # of `compare batch-size`, in place of steps
    target: float | None = None  # accuracy, of `compare batch-size`

    @property
    def run(self) -> Run:
        """The same as far as data and model go, for `zerofit.data.open_data`."""
        root = Path(self.data_root) if self.data_root else None
        names = ("model", "model_args", "data", "image_size", "seq_len", "tokenizer", "seed")
        return Run(data_root=root, **{name: getattr(self, name) for name in names})

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> CompareJob:
        """From JSON."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
