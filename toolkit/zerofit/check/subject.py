"""The configuration that rules check, with the hardware and the program that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerofit.check.catalog import Catalog
from zerofit.check.dotted import get, has
from zerofit.features.zero import ZERO
from zerofit.spec.model_facts import PRECISIONS, ModelFacts
from zerofit.spec.run import PipelineSchedule

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class GivenArgument:
    """An argument of the training program."""

    value: Any
    source: str  # "--micro-batch 4"
    place: str = ""  # "run.sh:12"; "" for a default or a flag

    @property
    def by(self) -> str:
        """The argument and its place."""
        return f"{self.source} ({self.place})" if self.place else self.source


@dataclass(frozen=True, kw_only=True)
class RequestedValue(GivenArgument):
    """The value that an argument sets for a key of the JSON."""

    # `value` may be a tuple: equivalent words in lower case, of which the JSON may have any.
    path: str
    compared: bool = True  # compare it with the JSON's value; else it only replaces "auto"
    severity: Literal["error", "warning"] = "error"
    refused: str = ""  # why the key must not be in both files, even with equal values
    overruled: str = ""  # why the JSON's value is used, if this reader usually uses its own


@dataclass(frozen=True, kw_only=True)
class TargetHardware:
    """The hardware and the program that the JSON is for; None: unknown."""

    ranks: int | None = None
    pipeline: int | None = None  # number of stages; a DeepSpeed JSON does not contain it
    schedule: PipelineSchedule = "1f1b"  # schedule of micro batches; a DeepSpeed JSON does not contain it
    accelerator: str | None = None  # "cuda" or "cpu"
    precisions: tuple[str, ...] = PRECISIONS  # that the device supports
    facts: ModelFacts | None = None
    reader: str = "zerofit"  # the program that reads the JSON, see zerofit.check.reader
    requested: tuple[RequestedValue, ...] = ()  # from flags and argument files
    guessed: bool = False  # whether the reader was guessed from the file
    one_thread: str | None = None  # the launcher that sets one thread per rank, and its place
    arguments: Mapping[str, GivenArgument] = field(default_factory=dict)  # written in a file of the program, by name
    host_bytes: int | None = None  # host memory of all nodes together


class UnclearValue(Exception):
    """Raised if a condition needs a value that DeepSpeed does not allow."""


@dataclass(frozen=True, kw_only=True)
class CheckSubject:
    """A configuration, and the hardware and the program that it is for.

    Getters raise UnclearValue for wrong values without a clear meaning.
    """

    config: Mapping[str, object]
    catalog: Catalog
    setting: TargetHardware = field(default_factory=TargetHardware)
    unclear: frozenset[str] = frozenset()  # dotted paths of wrong values, which the key check reports

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, or None."""
        if self.unclear and any(path == wrong or path.startswith(f"{wrong}.") for wrong in self.unclear):
            raise UnclearValue(path)
        return get(self.config, path)

    def holds(self, condition: Callable[[CheckSubject], object]) -> bool:
        """Return whether a condition is true; False if it needs an unclear value."""
        try:
            return bool(condition(self))
        except UnclearValue:
            return False

    def has(self, path: str) -> bool:
        """Return whether the key exists, with any value."""
        return has(self.config, path)

    def on(self, path: str) -> bool:
        """Return whether the value is true. A missing key has DeepSpeed's default."""
        # "auto" is not on: what fills it is unknown.
        value = self.get(path)
        return value is True or (value is None and self.default(path) is True)

    def off(self, path: str) -> bool:
        """Return whether the key exists and is false."""
        return self.get(path) is False

    def number(self, path: str) -> float | int | None:
        """Return the value if it is a number, else None."""
        value = self.get(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def word(self, path: str) -> str | None:
        """Return the value if it is a string other than "auto", else None."""
        value = self.get(path)
        return value if isinstance(value, str) and value != "auto" else None

    def count(self, path: str) -> int | None:
        """Return the value if it is a positive integer, else None."""
        value = self.number(path)
        return value if isinstance(value, int) and value > 0 else None

    def is_below(self, lower: str, upper: str) -> bool:
        """Return whether the values at both paths are numbers and the first is smaller."""
        first, second = self.number(lower), self.number(upper)
        return first is not None and second is not None and first < second

    def section(self, path: str) -> Mapping[str, object]:
        """Return the value if it is an object, else an empty object."""
        value = self.get(path)
        return value if isinstance(value, Mapping) else {}

    def changed(self, path: str) -> bool:
        """Return whether the key has a value other than DeepSpeed's default and "auto"."""
        value = self.get(path)
        return self.has(path) and value not in ("auto", None) and value != self.default(path)

    def default(self, path: str) -> object:
        """Return DeepSpeed's default, or None."""
        return self.catalog.default(path)

    def is_argument(self, path: str) -> bool:
        """Return whether a flag, an argument or an argument file sets the key."""
        return any(value.path == path for value in self.setting.requested)

    def argument(self, name: str) -> object:
        """Return an argument of the training program; None if no file contains it."""
        given = self.setting.arguments.get(name)
        return given.value if given else None

    def by(self, name: str) -> str:
        """Return an argument that a file contains, with its place."""
        return self.setting.arguments[name].by

    # short names for the rules' conditions, see rules/README.md
    reader = property(lambda self: self.setting.reader)
    facts = property(lambda self: self.setting.facts)
    precisions = property(lambda self: self.setting.precisions)
    one_thread = property(lambda self: self.setting.one_thread)
    host_bytes = property(lambda self: self.setting.host_bytes)
    optimizers = property(lambda self: self.catalog.optimizers)
    schedulers = property(lambda self: self.catalog.schedulers)
    fp16 = property(lambda self: self.on("fp16.enabled"))
    bf16 = property(lambda self: self.on("bf16.enabled"))
    deepcompile = property(lambda self: self.on("compile.deepcompile"))
    on_cpu = property(lambda self: self.setting.accelerator == "cpu")

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 if unknown."""
        return self.setting.ranks or 0

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 if none is given."""
        # The key check reports another stage. With 0, rules that depend on the stage report nothing more.
        value = self.number(f"{ZERO}.stage")
        return int(value) if value in (0, 1, 2, 3) else 0

    def offload(self, what: str) -> str | None:
        """Return the device to which "optimizer" or "param" states are offloaded, or None."""
        device = self.word(f"{ZERO}.offload_{what}.device")
        return device if device in ("cpu", "nvme") else None

    @property
    def optimizer(self) -> str | None:
        """The optimizer's name, in lower case if it is one of DeepSpeed's own."""
        name = self.word("optimizer.type")
        return name.lower() if name and name.lower() in self.catalog.optimizers else name

    @property
    def zenflow(self) -> bool:
        """Whether ZenFlow is configured."""
        return isinstance(self.get(f"{ZERO}.zenflow"), Mapping)

    def degree(self, path: str) -> int:
        """Return a parallel degree; 1 if none is given."""
        value = self.number(path)
        return int(value) if value and value > 1 else 1

    @property
    def tensor_parallel(self) -> int:
        """Tensor parallel degree."""
        return self.degree("tensor_parallel.autotp_size")

    @property
    def sequence_parallel(self) -> int:
        """Sequence parallel degree."""
        return self.degree("sequence_parallel_size")

    @property
    def pipeline(self) -> int:
        """Pipeline parallel degree."""
        return self.setting.pipeline or 1

    @property
    def dualpipev(self) -> bool:
        """Whether the pipeline's schedule is DualPipeV."""
        return self.pipeline > 1 and self.setting.schedule == "dualpipev"
