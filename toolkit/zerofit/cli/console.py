"""The consoles of all commands: plain text only, and the rendering of events on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from zerofit.spec.events import Event

STATUS_EVERY_S = 10.0  # between lines of a status where there is no terminal
TASK_EVERY_S = 5.0  # between lines of one task


def out(width: int | None = None) -> Console:
    """Return the console of answers; `width` is in columns, where standard output is not a terminal.

    What is printed is never read as markup: "[batch, seq]" is text.
    """
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else width)


def err() -> Console:
    """Return the console of everything else."""
    return Console(stderr=True, markup=False, highlight=False)


class EventConsole:
    """Shows events on standard error: bars and a spinner at a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = err()
        self.live = self.console.is_terminal
        self._said = 0.0
        self._tasks: dict[str, _PlainTask] = {}
        self._bars: dict[str, TaskID] = {}
        self._status: TaskID | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _WhereTotal(BarColumn(bar_width=20)),
            _Amount(),
            _WhereTotal(TimeElapsedColumn()),
            _WhereTotal(TimeRemainingColumn()),
            console=self.console,
            transient=True,
            disable=not self.live,
        )

    def __enter__(self) -> EventConsole:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind in ("note", "warning"):
            where = event.data.get("where")
            self.say(f"{event.kind}: {event.text}" + (f"\n     at: {where}" if where else ""))
        elif event.kind == "result":
            self.say(event.text)
        elif event.kind == "task":
            self._show_task(event)
        elif event.kind in ("status", "phase"):
            self._show_status(event.text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._progress.console.print(text, soft_wrap=True)

    def _show_status(self, text: str) -> None:
        if self.live:
            if self._status is None:
                self._status = self._progress.add_task(text, total=None, unit="")
            self._progress.update(self._status, description=text)
        elif time.monotonic() - self._said > STATUS_EVERY_S:
            self._said = time.monotonic()
            self.say(text)

    def _show_task(self, event: Event) -> None:
        if not self.live:
            if event.text not in self._tasks:
                self._tasks[event.text] = _PlainTask(event)
            self._tasks[event.text].show(event)
            if event.ended:
                del self._tasks[event.text]
            return
        if event.text not in self._bars:
            self._bars[event.text] = self._progress.add_task(event.text, total=event.total, unit=event.unit)
        self._progress.update(self._bars[event.text], completed=event.done, total=event.total)
        if event.ended:
            self._progress.remove_task(self._bars.pop(event.text))


class _PlainTask:
    """Plain lines of one task: at its start, every few seconds, at its end."""

    def __init__(self, event: Event) -> None:
        self._begun = self._said = time.monotonic()
        of = f" ({_amount(event.total, event.unit)})" if event.total else ""
        self._say(f"{event.text}{of} ...")

    def show(self, event: Event) -> None:
        """Say how far the task is, where that is due."""
        now = time.monotonic()
        if event.ended:
            done = f", {_amount(event.done, event.unit)}" if event.done else ""
            self._say(f"{event.text}: done{done} in {now - self._begun:.1f} s")
        elif now - self._said >= TASK_EVERY_S:
            self._said = now
            of = f" of {_amount(event.total, event.unit)}" if event.total else ""
            self._say(f"{event.text}: {_amount(event.done, event.unit)}{of}, {now - self._begun:.0f} s")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _WhereTotal(ProgressColumn):
    """A column that stays empty for tasks without an amount."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> object:  # type: ignore[override]
        return self._column(task) if task.fields["unit"] else Text("")


class _Amount(ProgressColumn):
    """Units done, bytes as MB."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._others = DownloadColumn(), MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        if not task.fields["unit"]:
            return Text("")
        return (self._bytes if task.fields["unit"] == "bytes" else self._others).render(task)


def _amount(n: int, unit: str) -> str:
    return f"{n / 1e6:.1f} MB" if unit == "bytes" else f"{n:,} {unit}".rstrip()
