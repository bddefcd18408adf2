"""The answer of `zerofit explain`, as `--json` prints it, and the evidence for its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from zerofit.explain.messages import MemoryFigures, Shortage
from zerofit.explain.progress import Progress
from zerofit.explain.tracebacks import CodeFrame
from zerofit.spec.files import field_data
from zerofit.spec.units import counted, first_names

UNKNOWN = "unknown"  # the cause if the evidence shows none
# steps after which the optimizer's states exist, so a step needs no more memory than the previous step
LATER = 2
MAX_RANKS = 8  # that a line names


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of code and the memory that it allocated."""

    place: str  # file:line
    function: str
    kind: str
    bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class ForecastAtMoment:
    """The simulated memory of the same run at the moment of the error."""

    phase: str
    kinds: dict[str, int]  # kind -> bytes
    allocated_bytes: int
    fits: bool
    parts: tuple[str, ...]  # sentences about the differences between run and forecast


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that would help."""

    change: str
    reserved_bytes: int | None = None  # simulated
    fits: bool | None = None  # simulated
    slowdown: float | None = None  # forecast slowdown, as a share of a step's time


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why memory ran out or a run failed, as far as the evidence shows the reason."""

    source: str  # "log", "snapshot" or "run folder"
    cause: str  # a stable name, or UNKNOWN
    place: str = ""  # "device", "host", "shared memory" or "kernel"; "" if no memory ran out
    summary: str  # the cause in a sentence or two
    evidence: tuple[str, ...] = ()  # sentences with the evidence
    message: str = ""  # the error
    at: str = ""  # the user's line that requested the memory, file:line
    function: str = ""
    code: str = ""  # that line
    asked_by: str = ""  # the innermost line outside of torch, if it is in a library
    phase: str = ""
    steps: int = 0  # steps before the error, if the log has them
    ranks: tuple[str, ...] = ()  # ranks that ran out of memory; () if the log names none
    figures: MemoryFigures = field(default_factory=MemoryFigures)
    alive: dict[str, int] = field(default_factory=dict)  # kind -> bytes
    lines: tuple[Line, ...] = ()  # the lines whose allocations use the most memory
    changes: tuple[Change, ...] = ()
    run_next: str = ""  # the command or line to run for a certain answer
    forecast: ForecastAtMoment | None = None

    @property
    def is_known(self) -> bool:
        """Whether the evidence shows the cause."""
        return self.cause != UNKNOWN

    @property
    def title(self) -> str:
        """The title: the cause of the error."""
        return f"{'out of memory' if self.place else 'explained'}: {self.cause.replace('-', ' ')}"

    @property
    def is_shortage(self) -> bool:
        """Whether memory ran out and the cause is known."""
        return self.is_known and bool(self.place)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield facts (label and text) in the order of a reader's questions: why, where, when, which memory."""
        yield from (("because", reason) for reason in self.evidence)
        if self.at:
            function = f" ({self.function})" if self.function else ""
            yield "your line", f"{self.at}{function}{f': {self.code}' if self.code else ''}"
        if self.asked_by:
            # Only a shortage of memory has a request; other failures have an exception.
            yield "requested by" if self.place else "raised in", self.asked_by
        steps = f"after {counted(self.steps, 'logged step')}" if self.steps else ""
        if when := ", ".join(filter(None, (self.phase, steps))):
            yield "when", when
        if self.ranks:
            yield "reported by", f"rank{'s' * (len(self.ranks) > 1)} {first_names(self.ranks, MAX_RANKS)}"
        if memory := str(self.figures):
            yield "memory", memory

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `zerofit explain --json`."""
        return field_data(self)


@dataclass(frozen=True, kw_only=True)
class LogEvidence:
    """All evidence that a log contains about one error."""

    shortage: Shortage
    frames: Sequence[CodeFrame]
    phase: str
    progress: Progress
    sharers: tuple[str, ...] = ()  # ranks that ran out of memory on the same device
    in_worker: bool = False  # whether the error is from a DataLoader's worker


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause, and its evidence."""

    name: str
    summary: str
    evidence: tuple[str, ...] = ()
    run_next: str = ""


Rule = Callable[[LogEvidence], Cause | None]
