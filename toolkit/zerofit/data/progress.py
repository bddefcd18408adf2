"""How long work tells that it moves: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

LINE_EVERY_S = 5.0


class ProgressTask(Protocol):
    """One piece of work under way."""

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""


class Progress(Protocol):
    """Shows pieces of work."""

    def task(self, text: str, total: int | None, unit: str) -> AbstractContextManager[ProgressTask]:
        """Show `text` while the context lasts; `total` units in all (None: unknown), "bytes" are shown as MB."""


class _Silent:
    def advance(self, n: int = 1) -> None:
        """Say nothing."""


class NullProgress:
    """Shows nothing; for ranks other than the first, and for tests."""

    @contextmanager
    def task(self, text: str, total: int | None, unit: str) -> Iterator[ProgressTask]:
        """Do nothing while the context lasts."""
        yield _Silent()


class _Lines:
    """Plain lines on standard error: at the start, every few seconds, at the end."""

    def __init__(self, text: str, total: int | None, unit: str):
        self._text, self._total, self._unit = text, total, unit
        self._done = 0
        self._begun = self._said = time.monotonic()
        of = f" ({_amount(total, unit)})" if total else ""
        self._say(f"{text}{of} ...")

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S:
            self._said = now
            of = f" of {_amount(self._total, self._unit)}" if self._total else ""
            self._say(f"{self._text}: {_amount(self._done, self._unit)}{of}, {now - self._begun:.0f} s")

    def end(self) -> None:
        done = f", {_amount(self._done, self._unit)}" if self._done else ""
        self._say(f"{self._text}: done{done} in {time.monotonic() - self._begun:.1f} s")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, bar, task_id):
        self._bar, self._task_id = bar, task_id

    def advance(self, n: int = 1) -> None:
        self._bar.advance(self._task_id, n)


class RichProgress:
    """A bar on standard error when that is a terminal, plain lines otherwise."""

    @contextmanager
    def task(self, text: str, total: int | None, unit: str) -> Iterator[ProgressTask]:
        """Show `text` with its progress, time and, where `total` is known, the time left."""
        if not sys.stderr.isatty():
            lines = _Lines(text, total, unit)
            yield lines
            lines.end()
            return
        with _rich_bar(unit) as bar:
            yield _Bar(bar, bar.add_task(text, total=total))


def _rich_bar(unit: str):
    from rich import progress
    from rich.console import Console

    count = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        count,
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _amount(n: int, unit: str) -> str:
    return f"{n / 1e6:.1f} MB" if unit == "bytes" else f"{n:,} {unit}".rstrip()
