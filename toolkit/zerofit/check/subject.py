"""The subject of a rule: the configuration, read without ever failing, and where it is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerofit.check.catalog import Catalog
from zerofit.check.dotted import get
from zerofit.spec.model_facts import PRECISIONS, ModelFacts
from zerofit.spec.run import PipelineSchedule

ZERO = "zero_optimization"
TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A value that a flag, an argument or a program asks for at a key of the JSON."""

    path: str
    value: Any  # a tuple: the words that mean it, in lower case
    said: str  # "--micro-batch 4"
    place: str = ""  # "run.sh:12"
    compared: bool = True  # with the JSON's own value; else it only takes the place of "auto"
    severity: Literal["error", "warning"] = "error"
    refused: str = ""  # why the key may not stand in both files, whatever its values
    overruled: str = ""  # who goes by the JSON's value, where that is not the reader's usual way

    @property
    def by(self) -> str:
        """What was said, and where."""
        return f"{self.said} ({self.place})" if self.place else self.said


@dataclass(frozen=True, kw_only=True)
class TargetHardware:
    """The hardware and the program that the JSON is for; None where nobody has said."""

    ranks: int | None = None
    pipeline: int | None = None  # stages: DeepSpeed's JSON does not say
    schedule: PipelineSchedule = "1f1b"  # of their micro batches: nor this
    accelerator: str | None = None  # "cuda" or "cpu"
    precisions: tuple[str, ...] = PRECISIONS  # that the device has
    facts: ModelFacts | None = None
    reader: str = "zerofit"  # the program that reads the JSON, see zerofit.check.reader
    asked: tuple[Asked, ...] = ()  # what flags, and files beside the JSON, have for its keys
    guessed: bool = False  # from the file, by nobody's word
    one_thread: str | None = None  # what starts the ranks with one thread each, and where that is said


@dataclass(frozen=True, kw_only=True)
class CheckSubject:
    """A configuration with its setting. Values of a wrong type read as missing: the key check has named them."""

    config: Mapping[str, Any]
    catalog: Catalog
    setting: TargetHardware = field(default_factory=TargetHardware)
    filled: frozenset[str] = frozenset()  # keys whose "auto" the setting's program has filled

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, or None."""
        return get(self.config, path)

    def has(self, path: str) -> bool:
        """Return whether the key stands there, whatever its value."""
        missing = object()
        return get(self.config, path, missing) is not missing

    def on(self, path: str) -> bool:
        """Return whether the value is true, by DeepSpeed's default where the key is missing."""
        value = self.get(path)
        return value is True or (value is None and self.catalog.default(path) is True)

    def off(self, path: str) -> bool:
        """Return whether the value is false, and the key is there."""
        return self.get(path) is False

    def number(self, path: str) -> float | int | None:
        """Return a number, or None."""
        value = self.get(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def word(self, path: str) -> str | None:
        """Return a string, or None; "auto" is none."""
        value = self.get(path)
        return value if isinstance(value, str) and value != "auto" else None

    def section(self, path: str) -> Mapping[str, Any]:
        """Return an object, or an empty one."""
        value = self.get(path)
        return value if isinstance(value, Mapping) else {}

    def changed(self, path: str) -> bool:
        """Return whether the key stands there with another value than DeepSpeed's default."""
        value = self.get(path)
        return self.has(path) and value not in ("auto", None) and value != self.catalog.default(path)

    fp16 = property(lambda self: self.on("fp16.enabled"))
    bf16 = property(lambda self: self.on("bf16.enabled"))
    deepcompile = property(lambda self: self.on("compile.deepcompile"))
    on_cpu = property(lambda self: self.setting.accelerator == "cpu")

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 where it is not known."""
        return self.setting.ranks or 0

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 where none is given."""
        value = self.number(f"{ZERO}.stage")
        return int(value) if value in (0, 1, 2, 3) else 0

    def offload(self, what: str) -> str | None:
        """Return the device that "optimizer" or "param" states are offloaded to, or None."""
        device = self.word(f"{ZERO}.offload_{what}.device")
        return device if device in ("cpu", "nvme") else None

    @property
    def optimizer(self) -> str | None:
        """The optimizer's name, in lower case if it is one of DeepSpeed's own."""
        name = self.word("optimizer.type")
        return name.lower() if name and name.lower() in self.catalog.optimizers else name

    @property
    def zenflow(self) -> bool:
        """Whether ZenFlow is asked for."""
        return isinstance(self.get(f"{ZERO}.zenflow"), Mapping)

    def degree(self, path: str) -> int:
        """Return a parallel degree; 1 where none is given."""
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
