"""Find a failure other than a shortage of memory: an entry of failures.yaml, else the exception that ended the run.

A log often has several failures, since the other ranks fail after the first. So entries that are causes come before
exceptions, and exceptions before entries that are consequences of another rank's failure.
"""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from zerofit.explain.log import LogLine
from zerofit.explain.messages import joined_message, shortened
from zerofit.explain.progress import progress_before

LAST_LINES = 50_000  # a failure is at the end of a log
LONGEST_TRACEBACK = 400  # lines
NO_SHORTAGE = "Memory did not run out."
NOT_FINITE = "not-finite"  # an entry
EXCEPTION = "exception"  # the cause if only a traceback shows it

_START = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: |$)")
_HANDLED = "During handling of the above exception"
# raised by launchers, and in processes that they stop
_LAUNCHERS = re.compile(r"ChildFailedError|CalledProcessError|SignalException|SystemExit|KeyboardInterrupt|\bEmpty\b")
_TIMEOUT = re.compile(r"OpType=(\w+).*?Timeout\(ms\)=(\d+)")


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
    import yaml  # most logs need no entry

    text = (files("zerofit.explain") / "failures.yaml").read_text(encoding="utf-8")
    return tuple(_entry(entry, kind == "consequences") for entry in yaml.safe_load(text)[kind])


def _entry(entry: dict[str, Any], is_consequence: bool) -> FailureEntry:
    pattern, changes = re.compile(entry.pop("pattern")), tuple(entry.pop("changes", ()))
    entry.setdefault("may_be_memory", is_consequence)
    return FailureEntry(pattern=pattern, changes=changes, is_consequence=is_consequence, **entry)


def find_failure(lines: Sequence[LogLine]) -> Failure | None:
    """Return the failure that explains a log's end best; None if the log has none."""
    last = lines[-LAST_LINES:]
    return _listed(last, "causes") or _exception(last) or _listed(last, "consequences")


def _listed(lines: Sequence[LogLine], kind: str) -> Failure | None:
    text = "\n".join(line.text for line in lines)
    starts = [0, *accumulate(len(line.text) + 1 for line in lines)]
    for entry in _entries(kind):
        found = [bisect_right(starts, match.start()) - 1 for match in entry.pattern.finditer(text)]
        if found:
            return _failure(entry, lines, found)
    return None


def _failure(entry: FailureEntry, lines: Sequence[LogLine], found: Sequence[int]) -> Failure:
    message = joined_message(lines, found[0])
    timeout = _TIMEOUT.search(message)
    return Failure(
        cause=entry.cause,
        summary=entry.summary if entry.may_be_memory else f"{NO_SHORTAGE} {entry.summary}",
        line=lines[found[0]],
        message=shortened(message),
        is_consequence=entry.is_consequence,
        ranks=tuple(dict.fromkeys(lines[at].rank for at in found if lines[at].rank)),
        evidence=(f"{timeout[1]} waited for {int(timeout[2]) / 1000:.0f} s",) if timeout else (),
        changes=entry.changes,
        run_next=entry.run_next,
    )


def _exception(lines: Sequence[LogLine]) -> Failure | None:
    """Return the first exception that ended the script; None if the run continued after the exception."""
    for at in _exceptions(lines):
        name, _, text = lines[at].text.strip().partition(": ")
        if any(entry.pattern.search(lines[at].text) for entry in _entries("consequences")):
            continue
        line = lines[at]
        if progress_before(lines, lines[-1].number + 1).went_on_after(progress_before(lines, line.number)):
            return None
        shown = f": {textwrap.shorten(text, 200, placeholder=' ...')}" if text else ""
        summary = f"{NO_SHORTAGE} The script stopped with {name}{shown}"
        ranks = (line.rank,) if line.rank else ()
        return Failure(
            cause=EXCEPTION, summary=summary, line=line, message=shortened(joined_message(lines, at)), ranks=ranks
        )
    return None


def _exceptions(lines: Sequence[LogLine]) -> Iterator[int]:
    """Yield the index of the last line of each traceback, except tracebacks of launchers and of handled exceptions."""
    for start, line in enumerate(lines):
        if _START not in line.text:
            continue
        own = [at for at in range(start + 1, min(len(lines), start + LONGEST_TRACEBACK)) if lines[at].rank == line.rank]
        ended = next((at for at in own if _EXCEPTION.match(lines[at].text)), None)
        if ended is None or _LAUNCHERS.search(lines[ended].text):
            continue
        if not any(_HANDLED in lines[at].text for at in own if ended < at < ended + 8):
            yield ended
