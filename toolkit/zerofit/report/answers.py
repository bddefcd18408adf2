"""Define the parts of `--json` output that a page shows. It may be from an untrusted file.

`zerofit explain` and `replay` print their own classes, which are read as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt, TypeAdapter

from zerofit.explain.not_finite import Replay
from zerofit.explain.result import Explanation
from zerofit.spec.foreign import MAX_BYTES, Unreadable, bounded, of_kind, parse_json, shaped

# Unknown keys are ignored, so a page also shows the output of a newer release. Fields that depend on an option have a
# default. Numbers must be finite: JSON from Python may contain NaN, which no chart shows.
Settings = dict[str, object]
Sizes = dict[str, NonNegativeInt]
NotEmpty = Field(min_length=1)
NO_RESULT = "it contains no result of zerofit --json (plan, tune, simulate, explain, replay, check or train)"


@dataclass(frozen=True, kw_only=True)
class ShownMoment:
    """A moment of a simulation's timeline."""

    t: NonNegativeInt
    phase: str
    step: int
    bytes: Sizes
    module: str = ""
    at: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownPhase:
    """A phase of a simulated rank."""

    name: str
    peak_bytes: NonNegativeInt
    step: int = -1


@dataclass(frozen=True, kw_only=True)
class ShownOverhead:
    """Device memory outside of torch."""

    name: str
    low_bytes: NonNegativeInt
    high_bytes: NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class ShownKnob:
    """A simulated change."""

    change: str
    peak_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt
    fits: bool
    slowdown: FiniteFloat | None = None


@dataclass(frozen=True, kw_only=True)
class ShownStage:
    """The simulated rank of a pipeline stage."""

    rank: int
    peak_bytes: NonNegativeInt
    peak_phase: str
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ShownTraffic:
    """Calls of a collective."""

    op: str
    bytes: NonNegativeInt
    group_size: int
    phase: str
    count: int


@dataclass(frozen=True, kw_only=True)
class SimulationAnswer:
    """`zerofit simulate --json`."""

    world_size: int
    rank: int
    device: str
    device_total_bytes: NonNegativeInt
    verdict: str
    fits: bool
    because: str
    peak_bytes: NonNegativeInt
    peak_phase: str
    peak_at: dict[str, str]
    breakdown: Sizes
    reserved_bytes: NonNegativeInt
    phases: list[ShownPhase]
    run: Settings
    layout: dict[str, int]
    smi_bytes: NonNegativeInt = 0
    host_node_bytes: NonNegativeInt = 0
    host_total_bytes: NonNegativeInt = 0
    overheads: list[ShownOverhead] = field(default_factory=list)
    stages: list[ShownStage] = field(default_factory=list)
    knobs: list[ShownKnob] = field(default_factory=list)
    comm: list[ShownTraffic] = field(default_factory=list)
    timeline: list[ShownMoment] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The title: model or script, rank and device."""
        name = self.run.get("name") or self.run.get("model")
        return f"{name}, rank {self.rank} of {self.world_size} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class ShownLayout:
    """A layout of a plan."""

    layout: str  # in words
    peak_bytes: NonNegativeInt
    samples_per_s: FiniteFloat
    step_s: FiniteFloat
    fits: bool
    verdict: str
    time: dict[str, FiniteFloat] = field(default_factory=dict)
    breakdown: Sizes = field(default_factory=dict)
    step_s_range: tuple[FiniteFloat, FiniteFloat] | None = None
    device_total_bytes: NonNegativeInt = 0
    host_bytes: NonNegativeInt = 0
    tokens_per_s: FiniteFloat | None = None
    mfu: FiniteFloat | None = None


@dataclass(frozen=True, kw_only=True)
class ShownFrontier:
    """A layout that no other layout beats in both memory and speed."""

    layout: str
    peak_bytes: NonNegativeInt
    samples_per_s: FiniteFloat


@dataclass(frozen=True, kw_only=True)
class ShownRejection:
    """Layouts that do not fit for one reason."""

    count: int
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownCluster:
    """The planned hardware."""

    gpu: str
    gpus: int
    nodes: int
    device_bytes: NonNegativeInt
    assumed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ShownBox:
    """One of the compared kinds of machines, with its fastest layout."""

    gpu: str
    gpus: int
    nodes: int
    layout: ShownLayout | None = None
    remedies: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """`zerofit plan --json`."""

    model: str
    parameters: NonNegativeInt
    precision: str
    cluster: ShownCluster
    layouts: list[ShownLayout]
    considered: int
    fitting: int
    seq_len: int | None = None
    misfits: list[ShownLayout] = field(default_factory=list)
    close: list[ShownLayout] = field(default_factory=list)
    frontier: list[ShownFrontier] = field(default_factory=list)
    boxes: list[ShownBox] = field(default_factory=list)
    rejections: list[ShownRejection] = field(default_factory=list)
    plainest: int | None = None
    padding: str = ""
    remedies: list[str] = field(default_factory=list)
    rates: dict[str, FiniteFloat] = field(default_factory=dict)
    rate_sources: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title: model and hardware."""
        nodes = f"{self.cluster.nodes} x " if self.cluster.nodes > 1 else ""
        return f"{self.model} in {self.precision} on {nodes}{self.cluster.gpus} x {self.cluster.gpu}"


@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """`zerofit plan --serve --json`."""

    model: str
    gpu: str
    gpus: int
    release: str
    settings: Settings
    device_total_bytes: NonNegativeInt
    breakdown: Sizes
    cache_tokens: NonNegativeInt
    sequences: FiniteFloat
    largest_utilization: FiniteFloat
    smallest_utilization: FiniteFloat
    longest: int
    fits: bool
    problem: str | None = None
    remedies: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The title: model, engine and hardware."""
        return f"{self.model} in vLLM {self.release} on {self.gpus} x {self.gpu}"


@dataclass(frozen=True, kw_only=True)
class ShownArrangement:
    """An arrangement of training and generation on the GPUs."""

    name: str
    fits: bool
    layout: Settings
    phases: dict[str, Sizes]
    highest: str
    highest_bytes: NonNegativeInt
    device_total_bytes: NonNegativeInt
    time: dict[str, FiniteFloat | None]

    @property
    def training(self) -> str:
        """The trainer's layout, in words."""
        return f"ZeRO-{self.layout.get('zero_stage')}, micro batch {self.layout.get('micro_batch')}"


@dataclass(frozen=True, kw_only=True)
class RolloutAnswer:
    """`zerofit plan --method --json`."""

    method: str
    model: str
    gpu: str
    ranks: int
    seq_len: int
    fits: bool
    arrangements: Annotated[list[ShownArrangement], NotEmpty]  # the best first
    findings: list[dict[str, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The title: method, model and hardware."""
        return f"{self.method} of {self.model} on {self.ranks} x {self.gpu}"


@dataclass(frozen=True, kw_only=True)
class ShownTrial:
    """A configuration that tune measured, or that failed."""

    configuration: str
    status: str
    forecast_step_s: FiniteFloat
    measured_step_s: FiniteFloat | None = None
    spread: FiniteFloat | None = None
    peak_bytes: NonNegativeInt | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownRegret:
    """How much faster untried configurations may be."""

    best_step_s: FiniteFloat
    untried: int
    at_most: FiniteFloat


@dataclass(frozen=True, kw_only=True)
class TuneAnswer:
    """`zerofit tune --json`."""

    trials: Annotated[list[ShownTrial], NotEmpty]
    regret: ShownRegret
    considered: int
    written: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The title: the number of trials, and of all configurations."""
        return f"tune: {len(self.trials)} of {self.considered} configurations measured"


@dataclass(frozen=True, kw_only=True)
class ShownFinding:
    """A finding of the checker."""

    severity: str
    message: str
    path: str = ""
    line: int = 0
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckAnswer:
    """`zerofit check --json` for one file."""

    file: str
    problems: list[ShownFinding]
    reader: str = ""
    note: str = ""
    resolved: Settings = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title: the checked file."""
        return self.file


Forecast = SimulationAnswer | PlanAnswer | ServingAnswer | RolloutAnswer
Result = Forecast | TuneAnswer | Explanation | Replay | CheckAnswer
# keys that identify a JSON -> its form
FORMS: tuple[tuple[set[str], type[Result]], ...] = (
    ({"peak_bytes", "breakdown", "world_size"}, SimulationAnswer),
    ({"layouts", "considered", "cluster"}, PlanAnswer),
    ({"release", "cache_tokens", "breakdown"}, ServingAnswer),
    ({"method", "arrangements"}, RolloutAnswer),
    ({"trials", "regret"}, TuneAnswer),
    ({"cause", "summary", "source"}, Explanation),
    ({"cause", "summary", "start_step"}, Replay),
    ({"file", "problems"}, CheckAnswer),
)


def results_of(value: Mapping[str, object]) -> list[Result]:
    """Return the results in a command's JSON. Raises Unreadable."""
    files = value.get("files")  # `check` has one result for each file
    if isinstance(files, list):
        return [found for file in files for found in results_of(of_kind(file, dict))]
    # `check` writes the error of a file that it could not read next to the name of the file.
    if isinstance(error := value.get("error"), dict):
        message = str(error.get("message"))
        if "file" not in value:
            raise Unreadable(f"it contains the error of a command, not a result: {message}")
        value = {"file": value["file"], "problems": [{"severity": "error", "message": message}]}
    for keys, form in FORMS:
        if keys <= value.keys():
            return [shaped(value, TypeAdapter(form))]
    raise Unreadable(NO_RESULT)


def read_saved(path: Path) -> dict[str, object]:
    """Return the JSON in a file, or in its last line. Raises OSError and Unreadable."""
    text = bounded(path, MAX_BYTES)
    try:
        return of_kind(parse_json(text), dict)
    except Unreadable:  # a log, which ends with the result
        with suppress(Unreadable):
            return of_kind(parse_json(text.strip().rpartition(b"\n")[2]), dict)
        raise
