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

from zerofit.spec.files import write_json
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
        """A run with the same data and model, for `zerofit.data.open_data`."""
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


# A new strategy is a file in strategies/ with `train(work)`, and an entry here.
_ALL = (
    Strategy(name="single", title="one device", file="single", one=True, replicas=True),
    Strategy(name="model-parallel", title="layers split by hand over ranks", file="model_parallel", least_ranks=2),
    Strategy(
        name="device-map", title="layers on different devices, by Accelerate's map", file="device_map", alone=True
    ),
    Strategy(name="data-parallel-threads", title="torch.nn.DataParallel", file="data_parallel_threads", alone=True),
    Strategy(
        name="threads", title="data parallel in threads, written by hand", file="threads", alone=True, replicas=True
    ),
    Strategy(name="data-parallel", title="data parallel from scratch", file="data_parallel", replicas=True),
    *(
        Strategy(
            name=f"all-reduce-{how}",
            title=f"data parallel, all-reduce written by hand: {title}",
            file=f"all_reduce_{how}",
            replicas=True,
        )
        for how, title in (
            ("central", "on one central device"),
            ("ring", "round a ring"),
            ("tree", "along a tree"),
            ("halving", "by recursive halving"),
        )
    ),
    Strategy(name="ddp", title="DistributedDataParallel", file="ddp", replicas=True),
    Strategy(name="horovod", title="Horovod", file="horovod", replicas=True),
    Strategy(name="parameter-server", title="parameter server, synchronous", file="parameter_server", servers=1),
    Strategy(
        name="parameter-server-async",
        title="parameter server, asynchronous",
        file="parameter_server_async",
        servers=1,
        synchronous=False,
    ),
    Strategy(
        name="parameter-server-ssp",
        title="parameter server, staleness bounded to 3 steps",
        file="parameter_server_ssp",
        options={"bound": 3},
        servers=1,
        synchronous=False,
    ),
    Strategy(
        name="backup-workers",
        title="parameter server, synchronous, one backup worker",
        file="backup_workers",
        options={"spare": 1},
        servers=1,
        synchronous=False,
        least_ranks=2,
    ),
    Strategy(name="amp", title="mixed precision on one device, bf16", file="amp", one=True, synchronous=False),
    Strategy(
        name="amp-fp16",
        title="mixed precision on one device, fp16 with a loss scaler",
        file="amp",
        options={"fp16": True},
        one=True,
        synchronous=False,
    ),
    Strategy(name="fsdp2", title="FSDP2 (fully_shard)", file="fsdp2"),
    Strategy(name="accelerate", title="Accelerate", file="accelerate_loop", replicas=True),
    *(
        Strategy(
            name=f"zero{stage}",
            title=f"DeepSpeed ZeRO {stage}",
            file="zero",
            options={"stage": stage},
            replicas=stage == 0,
        )
        for stage in range(4)
    ),
    Strategy(
        name="zero2-offload",
        title="DeepSpeed ZeRO 2, optimizer in host memory",
        file="zero",
        options={"stage": 2, "offload": True},
    ),
    Strategy(name="pipeline", title="pipeline (GPipe)", file="pipeline", least_ranks=2),
    Strategy(name="tensor-parallel", title="tensor parallel", file="tensor_parallel", least_ranks=2),
    Strategy(name="hybrid", title="model parallel in pairs, data parallel across them", file="hybrid", least_ranks=4),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}
