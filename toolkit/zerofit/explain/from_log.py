"""Explain a log from its most informative message about memory, the traceback before it, and the run's progress."""

from __future__ import annotations

from collections.abc import Sequence

from zerofit.explain.advice import changes_for, for_device
from zerofit.explain.causes import cause_of
from zerofit.explain.evidence import LogEvidence
from zerofit.explain.log import LogLine
from zerofit.explain.messages import Shortage, ranked, shortages
from zerofit.explain.progress import progress_before
from zerofit.explain.result import Change, Explanation
from zerofit.explain.tracebacks import caller_of_torch, frames_before, own_frame, phase_of

WORKER = "in DataLoader worker process"


def explain_log(lines: Sequence[LogLine], source: str = "log") -> Explanation | None:
    """Return why memory ran out; None if the log has no message about missing memory."""
    found = shortages(lines)
    if not found:
        return None
    shortage = ranked(found)[0]
    same = [other for other in found if other.kind == shortage.kind]
    frames = frames_before(lines, shortage.line)
    progress = progress_before(lines, shortage.line)
    phase = phase_of(frames)
    cause = cause_of(
        LogEvidence(
            shortage=shortage,
            frames=frames,
            phase=phase,
            progress=progress,
            sharers=_sharers(same, shortage),
            in_worker=any(WORKER in line.text for line in lines if abs(line.number - shortage.line) < 60),
        )
    )
    own, asking = own_frame(frames), caller_of_torch(frames)
    return Explanation(
        source=source,
        cause=cause.name,
        place=shortage.place,
        summary=cause.summary,
        evidence=cause.evidence,
        message=shortage.message,
        at=own.place if own else "",
        function=own.name if own else "",
        code=own.code if own else "",
        asked_by=asking.place if asking and asking is not own else "",
        phase=phase or progress.activity,
        steps=progress.steps,
        ranks=tuple(dict.fromkeys(other.rank for other in same if other.rank)),
        figures=shortage.figures,
        changes=tuple(Change(change=text) for text in changes_for(cause.name, shortage.message)),
        run_next=for_device(cause.run_next, shortage.message),
    )


def _sharers(found: Sequence[Shortage], shortage: Shortage) -> tuple[str, ...]:
    """Return the ranks that ran out of memory on the same device.

    They name the same device number, and each of them saw other processes on the device.
    """
    ranks = (other.rank for other in found if other.gpu == shortage.gpu and other.figures.other_bytes and other.rank)
    return tuple(dict.fromkeys(ranks))
