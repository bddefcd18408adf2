"""The strategies, and the job that is the same for all: model, data, samples, optimizer."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from zerofit.spec.files import packaged_yaml, write_json
from zerofit.spec.run import Run

MOMENTUM = 0.9
WARM = 3  # steps that are not timed, because of connections and caches
RankReport = dict[str, Any]  # the measurements of a process, or the reason why it has none
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """The description of one measurement, which its processes read from a JSON file."""

    strategy: str
    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    data_root: str | None = None
    image_size: int | None = None
    seq_len: int | None = None
    tokenizer: str = "bytes"
    ranks: int = 2  # devices; a parameter server is an extra process
    global_batch: int = 64  # samples of one optimizer step, over all ranks
    steps: int = 60
    lr: float = 0.02  # of SGD with momentum 0.9
    seed: int = 0
    eval_samples: int = 1000
    accelerator: str = "cpu"  # or "cuda"
    phases: Sequence[tuple[int, int, float]] = ()  # instead of steps: epochs, samples per step, learning rate
    target: float | None = None  # accuracy whose time is measured
    slow: dict[str, float] = field(default_factory=dict)  # rank -> factor on the time of its steps
    hosts: Sequence[tuple[str, int]] = ()  # names and slots, in the order of the ranks; (): this machine
    straggle: float = 0.0  # probability that a step takes `benchmark_task.STRAGGLER` times as long

    @property
    def run(self) -> Run:
        """A run with the same data and model, for `zerofit.data.opening.open_data`."""
        root = Path(self.data_root) if self.data_root else None
        names = ("model", "model_args", "data", "image_size", "seq_len", "tokenizer", "seed")
        # Strategies pass only tokens to a model, and packed text also needs the beginnings of its documents.
        return Run(data_root=root, packing=False, **{name: getattr(self, name) for name in names})

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> CompareJob:
        """Read a job that was written as JSON."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train."""

    name: str
    title: str
    file: str  # in `strategies/`
    options: dict[str, Any] = field(default_factory=dict)  # arguments of its train()
    alone: bool = False  # one process drives all devices
    one: bool = False  # uses one device, however many there are
    servers: int = 0  # extra processes besides the ranks'
    synchronous: bool = True  # computes the same sums as one device, so the same weights except for the last bits
    least_ranks: int = 1
    replicas: bool = False  # every process holds all weights, gradients and momentum

    def processes(self, ranks: int) -> int:
        """Return the number of processes for this many devices."""
        return (1 if self.alone or self.one else ranks) + self.servers

    @property
    def source(self) -> Path:
        """The strategy's file."""
        return Path(__file__).parent / "strategies" / f"{self.file}.py"

    @property
    def lines(self) -> int:
        """The number of lines of the strategy's code, see `code_lines`."""
        return code_lines(self.source.read_text(encoding="utf-8"))

    def load(self) -> ModuleType:
        """Import the strategy's module."""
        return importlib.import_module(f"zerofit.compare.strategies.{self.file}")


def code_lines(source: str) -> int:
    """Count the lines with code, without comments, docstrings, imports and blank lines."""
    tree, lines = ast.parse(source), set[int]()
    documented = [n for n in ast.walk(tree) if isinstance(n, DOCUMENTED) and ast.get_docstring(n) is not None]
    docstrings = {id(node.body[0]) for node in documented}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.Import | ast.ImportFrom) or id(node) in docstrings:
            continue
        # Of a block, only the first line: the statements in it count on their own.
        last = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
        lines |= set(range(node.lineno, last + 1))
    return len(lines)


_ENTRIES = packaged_yaml((Path(__file__).parent / "strategies.yaml").read_text(encoding="utf-8"))
STRATEGIES = {entry["name"]: Strategy(**{"file": entry["name"].replace("-", "_"), **entry}) for entry in _ENTRIES}
