"""What a log shows about an error, and a cause that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerofit.explain.messages import Shortage
from zerofit.explain.progress import Progress
from zerofit.explain.tracebacks import CodeFrame

LATER = 2  # steps after which the optimizer's states exist, so that a step needs no more than the one before


@dataclass(frozen=True, kw_only=True)
class LogEvidence:
    """All that a log shows about one error."""

    shortage: Shortage
    frames: Sequence[CodeFrame]
    phase: str
    progress: Progress
    sharers: tuple[str, ...] = ()  # ranks that ran out on the same device
    in_worker: bool = False  # of a DataLoader


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause, and what shows it."""

    name: str
    summary: str
    evidence: tuple[str, ...] = ()
    run_next: str = ""


Rule = Callable[[LogEvidence], Cause | None]
