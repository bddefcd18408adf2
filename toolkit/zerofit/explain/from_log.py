"""Explain a log from its best message, the traceback before it, and the run's progress."""

from __future__ import annotations

from collections.abc import Sequence

from zerofit.explain.advice import changes_for, for_device
from zerofit.explain.causes import cause_of
from zerofit.explain.failures import EXCEPTION, Failure, find_failure
from zerofit.explain.log import LogLine
from zerofit.explain.messages import Shortage, ranked, shortages
from zerofit.explain.progress import Progress, progress_before, went_on_after
from zerofit.explain.result import Change, Explanation, LogEvidence
from zerofit.explain.tracebacks import caller_of_torch, frames_before, own_frame, phase_of

WORKER = "in DataLoader worker process"


def explain_log(lines: Sequence[LogLine], source: str = "log") -> Explanation | None:
    """Return why memory ran out, or which other failure ended the run; None for neither."""
    progress = progress_before(lines, lines[-1].number + 1) if lines else Progress()
    # A script may catch an error and continue, for example with a smaller batch. Then this error did not end the run.
    fatal = (
        shortage
        for shortage in shortages(lines)
        if shortage.sign.ends_process or not went_on_after(lines, shortage.line, progress)
    )
    found = ranked(list(fatal))
    if found and found[0].is_certain:
        return _of_shortage(lines, found, source)
    failure = find_failure(lines, progress)
    if failure is None:
        return _of_shortage(lines, found, source) if found else None
    # The shortage of memory explains the log in two cases. Either the failure is of a kind that often follows from
    # another rank's failure, or it is an exception that was logged after the shortage.
    if found and (failure.is_consequence or (failure.cause == EXCEPTION and found[0].line <= failure.line.number)):
        return _of_shortage(lines, found, source)
    return _of_failure(lines, failure, source)


def _of_failure(lines: Sequence[LogLine], failure: Failure, source: str) -> Explanation:
    frames = frames_before(lines, failure.line.number)
    own, progress = own_frame(frames), progress_before(lines, failure.line.number)
    return Explanation(
        source=source,
        cause=failure.cause,
        summary=failure.summary,
        evidence=failure.evidence,
        message=failure.message,
        at=own.place if own else "",
        function=own.name if own else "",
        code=own.code if own else "",
        asked_by="" if own or not frames else frames[-1].place,
        phase=phase_of(frames) or progress.activity,
        steps=progress.steps,
        ranks=failure.ranks,
        changes=tuple(Change(change=text) for text in changes_for(failure.cause, failure.message) or failure.changes),
        run_next=for_device(failure.run_next, failure.message),
    )


def _of_shortage(lines: Sequence[LogLine], found: Sequence[Shortage], source: str) -> Explanation:
    shortage = found[0]
    same = [other for other in found if other.sign == shortage.sign]
    # ranks share a device if they name the same device number, and each of them saw other processes on the device
    sharers = (other.rank for other in same if other.gpu == shortage.gpu and other.figures.other_bytes and other.rank)
    frames = frames_before(lines, shortage.line)
    progress = progress_before(lines, shortage.line)
    phase = phase_of(frames)
    cause = cause_of(
        LogEvidence(
            shortage=shortage,
            frames=frames,
            phase=phase,
            progress=progress,
            sharers=tuple(dict.fromkeys(sharers)),
            # torch names the worker in a line of its own, near the traceback that it received from the worker.
            in_worker=any(WORKER in line.text for line in lines if abs(line.number - shortage.line) < 60),
        )
    )
    own, caller = own_frame(frames), caller_of_torch(frames)
    return Explanation(
        source=source,
        cause=cause.name,
        place=shortage.sign.place,
        summary=cause.summary,
        evidence=cause.evidence,
        message=shortage.message,
        at=own.place if own else "",
        function=own.name if own else "",
        code=own.code if own else "",
        asked_by=caller.place if caller and caller is not own else "",
        phase=phase or progress.activity,
        steps=progress.steps,
        ranks=tuple(dict.fromkeys(other.rank for other in same if other.rank)),
        figures=shortage.figures,
        changes=tuple(Change(change=text) for text in changes_for(cause.name, shortage.message)),
        run_next=for_device(cause.run_next, shortage.message),
    )
