"""Find a failure other than a shortage of memory, by failures.yaml or by its exception."""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile
from typing import Any

from zerofit.explain.data import any_of, read_data
from zerofit.explain.log import LONGEST_TRACEBACK, TRACEBACK, LogLine
from zerofit.explain.messages import ended_by, joined_message, shortened
from zerofit.explain.progress import Progress, went_on_after
from zerofit.explain.tracebacks import CODE_LINE, ERROR_LINE

LAST_LINES = 50_000  # a failure is at the end of a log
FRAME_LINES = 4  # lines of a frame: the place, the code, and marks below it
NO_SHORTAGE = "Memory did not run out."
NOT_FINITE = "not-finite"  # an entry
EXCEPTION = "exception"  # the cause if only a traceback shows it

_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:(?=\w*[a-z])[A-Z]\w*|(?<=\.)\w*error)(?::(?: |$)|$)")
_FRAME = re.compile(CODE_LINE.pattern + "$")
_HANDLED = "During handling of the above exception"
_IGNORED = re.compile(r"Exception ignored |--- Logging error ---")  # the line before such a traceback
# torchrun's report: the time and the rank of the failure that it observed first
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):\n.*\n *time *: (\S+)\n.*\n *rank *: (\d+)")
# raised by launchers, in processes that they stop, and before the original traceback of a worker
_LAUNCHERS = re.compile(
    r"ChildFailedError|(?:^|\.)CalledProcessError|SignalException|SystemExit|KeyboardInterrupt|\bEmpty\b"
    r"|spawn\.Process(?:Raised|Exited)Exception|: Caught \w+ in "
)
_WARNING = re.compile(r"\b(?:[A-Z]\w*)?(?:Warning|WARNING)\b")
_TIMEOUT = re.compile(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)")
_NCCL = re.compile(r"Last error: (.+)")  # torch adds NCCL's own message to its error


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure other than a shortage of memory."""

    cause: str
    summary: str
    line: LogLine
    message: str
    is_consequence: bool = False
    ranks: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    run_next: str = ""


@dataclass(frozen=True, kw_only=True)
class FailureEntry:
    """An entry of failures.yaml."""

    cause: str
    pattern: re.Pattern[str]
    summary: str
    is_consequence: bool
    may_be_memory: bool  # whether a process that ran out of memory, and left no message, may be the cause
    changes: tuple[str, ...] = ()
    run_next: str = ""


@cache
def _entries(kind: str) -> tuple[FailureEntry, ...]:
    return tuple(_entry(kind == "consequences", **entry) for entry in read_data("failures.yaml")[kind])


def _entry(
    follows: bool, pattern: str, changes: Sequence[str] = (), signals: Sequence[int] = (), **fields: Any
) -> FailureEntry:
    fields = {"may_be_memory": follows, "is_consequence": follows, **fields}
    return FailureEntry(pattern=any_of([pattern, *map(ended_by, signals)]), changes=tuple(changes), **fields)


def find_failure(lines: Sequence[LogLine], progress: Progress) -> Failure | None:
    """Return the failure that explains a log's end best; None if the log has none."""
    last = lines[-LAST_LINES:]
    # A log often has several failures, since the other ranks fail after the first. So entries that are causes come
    # before exceptions, and exceptions before entries that are consequences of another rank's failure.
    return _listed(last, progress, "causes") or _exception(last, progress) or _listed(last, progress, "consequences")


def _listed(lines: Sequence[LogLine], progress: Progress, kind: str) -> Failure | None:
    """Return the first entry of failures.yaml that the log matches after its last step."""
    # a pattern may span lines, so the log is searched as one text; `starts` finds the line of a match
    text = "\n".join(line.text for line in lines)
    starts = [0, *accumulate(len(line.text) + 1 for line in lines)]
    for entry in _entries(kind):
        found = [bisect_right(starts, match.start()) - 1 for match in entry.pattern.finditer(text)]
        last = [at for at in found if not went_on_after(lines, lines[at].number, progress)]
        # A library often warns of a fault that it then handles. Such a line counts only without an exception after it.
        if any(_WARNING.search(lines[at].text) for at in last):  # an error that follows explains the end better
            final = max(_exceptions(lines), default=-1)
            last = [at for at in last if not _WARNING.search(lines[at].text) or at >= final]
        if last:  # a run may continue with a loss that is not finite
            return _failure(entry, lines, found if entry.cause == NOT_FINITE else last)
    return None


def _failure(entry: FailureEntry, lines: Sequence[LogLine], found: Sequence[int]) -> Failure:
    message = joined_message(lines, found[0])
    timeout, nccl = _TIMEOUT.search(message), _NCCL.search(message)
    evidence = (f"{timeout[1]} waited for {int(timeout[2]) / 1000:.0f} s",) if timeout else ()
    return Failure(
        cause=entry.cause,
        summary=entry.summary if entry.may_be_memory else f"{NO_SHORTAGE} {entry.summary}",
        line=lines[found[0]],
        message=shortened(message),
        is_consequence=entry.is_consequence,
        ranks=tuple(dict.fromkeys(lines[at].rank for at in found if lines[at].rank)),
        evidence=(*evidence, shortened(nccl[1])) if nccl else evidence,
        changes=entry.changes,
        run_next=entry.run_next,
    )


def _exception(lines: Sequence[LogLine], progress: Progress) -> Failure | None:
    """Return the first exception that ended the script; None if the run continued after all."""
    # torchrun's reports name the rank that failed first; without one, the first exception in the log counts
    # The times begin with the year, so the smallest text is the earliest failure of all hosts.
    reports = _FIRST_FAILURE.findall("\n".join(line.text for line in lines))
    first = min(reports)[1] if reports else ""
    for at in sorted(_exceptions(lines), key=lambda at: (bool(first) and lines[at].rank != first, at)):
        line = lines[at]
        if any(entry.pattern.search(line.text) for entry in _entries("consequences")):
            continue
        if went_on_after(lines, line.number, progress):
            continue
        name, _, text = line.text.strip().partition(": ")
        shown = f": {textwrap.shorten(text, 200, placeholder=' ...')}" if text else ""
        summary = f"{NO_SHORTAGE} The script stopped with {name}{shown}"
        ranks = (line.rank,) if line.rank else ()
        return Failure(
            cause=EXCEPTION, summary=summary, line=line, message=shortened(joined_message(lines, at)), ranks=ranks
        )
    return None


def _exceptions(lines: Sequence[LogLine]) -> list[int]:
    """Return the index of the last line of each traceback.

    Leave out launchers' tracebacks, and exceptions that were handled or ignored.
    """
    found = list[int]()
    # by rank: the first line of the current traceback, the last line of the traceback before, and earlier lines
    opened, closed, earlier = dict[str, int](), dict[str, int](), dict[str, deque[str]]()
    for at, line in enumerate(lines):
        before = earlier.setdefault(line.rank, deque(maxlen=FRAME_LINES))
        if TRACEBACK in line.text:
            is_ignored = bool(before and _IGNORED.match(before[-1]))
            opened[line.rank] = -LONGEST_TRACEBACK if is_ignored else at
        elif _HANDLED in line.text:
            found = [other for other in found if other != closed.get(line.rank)]
        elif _EXCEPTION.match(line.text):
            # a traceback whose first lines are missing: the log begins with its last line, or with a frame
            # A log can begin within a traceback, since a scheduler or `tail` may have cut it.
            is_cut = ERROR_LINE.match(line.text) and (not before or _ends_frame(before))
            start = opened.pop(line.rank, at if is_cut else -LONGEST_TRACEBACK)
            if at - start < LONGEST_TRACEBACK:
                closed[line.rank] = at
                if not _LAUNCHERS.search(line.text):
                    found.append(at)
        if line.text.strip():
            before.append(line.text)
    return found


def _ends_frame(texts: Sequence[str]) -> bool:
    """Return whether the last of these lines belongs to a frame of a traceback."""
    indented = takewhile(lambda text: text.startswith(" "), reversed(texts))
    return any(_FRAME.match(text) for text in indented)
