"""The answer of `zerofit explain`, as `--json` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerofit.explain.messages import MemoryFigures
from zerofit.spec.files import field_data

UNKNOWN = "unknown"  # the cause that the figures do not show


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
    """What a simulation of the same run has for the moment of the error."""

    phase: str
    kinds: dict[str, int]  # kind -> bytes
    allocated_bytes: int
    fits: bool
    parts: tuple[str, ...]  # where run and forecast part, one sentence each


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that makes room."""

    change: str
    reserved_bytes: int | None = None  # simulated
    fits: bool | None = None  # simulated
    slowdown: float | None = None  # forecast, as a share of a step's time


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why memory ran out, as far as the evidence shows."""

    source: str  # "log", "snapshot" or "run folder"
    cause: str  # a stable name, or UNKNOWN
    place: str  # "device", "host", "shared memory" or "kernel"
    summary: str  # the cause in a sentence or two
    evidence: tuple[str, ...] = ()  # what shows it
    message: str = ""  # the error
    at: str = ""  # the user's line that asked, file:line
    function: str = ""
    code: str = ""  # that line
    asked_by: str = ""  # the innermost line outside of torch, if it is a library's
    phase: str = ""
    steps: int = 0  # steps before the error, if the log has them
    ranks: tuple[str, ...] = ()  # that ran out; () if the log names none
    figures: MemoryFigures = field(default_factory=MemoryFigures)
    alive: dict[str, int] = field(default_factory=dict)  # kind -> bytes
    lines: tuple[Line, ...] = ()  # the lines that hold most
    changes: tuple[Change, ...] = ()
    run_next: str = ""  # what to run for a sure answer
    forecast: ForecastAtMoment | None = None

    @property
    def is_known(self) -> bool:
        """Whether the evidence shows the cause."""
        return self.cause != UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zerofit explain --json`."""
        return field_data(self)
