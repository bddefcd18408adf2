"""The evidence that a log contains about an error, and the cause that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerofit.explain.messages import Shortage
from zerofit.explain.progress import Progress
from zerofit.explain.tracebacks import CodeFrame

# steps after which the optimizer's states exist, so a step needs no more memory than the previous step
LATER = 2


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
