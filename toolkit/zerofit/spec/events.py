"""Progress events of running work, which the command line shows and `on_event` receives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = Literal[
    "status",  # what is being done now; replaces the previous status
    "phase",  # a status of a run that gets its own line without a terminal
    "task",  # work counted in units: `done` of `total`
    "note",  # something a user should know
    "warning",  # something a user should look at, at `data["where"]`
    "result",  # one part of the work (a trial, a row) is done: `data` has its figures
    "stages",  # the layers of a pipeline: `data["stages"]` has a row for each stage
    "ranks",  # unusual states of a run's ranks; empty if all is well
    "training",  # ranks begin to train: `data` has steps, and done if the run resumes
    "metrics",  # one record of metrics.jsonl
    "saved",  # a checkpoint is complete: step, save_s
    "text",  # a piece of generated text
    "evaluated",  # figures of an evaluation: step, loss, accuracy or perplexity
    "checks",  # checks of hosts before a start: `data` has checks (doctor's rows) and the number of hosts
]
REPORT_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened: the argument of `on_event`, which the command line shows.

    >>> event = Event(kind="saved", text="step 20: checkpoint saved in 0.3 s", data={"step": 20, "save_s": 0.3})
    >>> print(event)
    step 20: checkpoint saved in 0.3 s
    >>> event.data["step"]
    20
    """

    kind: Kind
    text: str = ""
    done: int = 0  # units of a task so far
    total: int | None = None  # units of a task in all; None: unknown
    unit: str = ""  # "bytes", "images", "parameters"
    ended: bool = False  # the task is over
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def stages_event(stages: Sequence[Mapping[str, object]]) -> Event:
    """Return the event for a pipeline's `stages`, each a `PipelineStage` as a dictionary."""
    return Event(kind="stages", text=f"layers on {len(stages)} pipeline stages", data={"stages": stages})


OnEvent = Callable[[Event], None]


class Task:
    """A piece of work in progress, reported at most ten times a second."""

    def __init__(self, on_event: OnEvent, text: str, total: int | None, unit: str):
        self._on_event, self._text, self._total, self._unit = on_event, text, total, unit
        self._done, self._reported_s = 0, time.monotonic()
        self._report()

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        self._done += n
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._report()

    def end(self) -> None:
        """Report that the work is done."""
        self._report(ended=True)

    def _report(self, ended: bool = False) -> None:
        self._on_event(
            Event(kind="task", text=self._text, done=self._done, total=self._total, unit=self._unit, ended=ended)
        )


def shielded(on_event: OnEvent) -> OnEvent:
    """Return a callback that logs the first exception of `on_event` and ignores later ones."""
    failed = False

    def report(event: Event) -> None:  # the run continues
        nonlocal failed
        try:
            on_event(event)
        except Exception:
            if not failed:
                logging.getLogger(__name__).exception("cannot show an event (logged once); the run continues")
            failed = True

    return report


class Reporter:
    """Sends events to a callback, if there is one.

    >>> report = Reporter(lambda event: print(event.kind, event.text))
    >>> report.note("2 images were skipped")
    note 2 images were skipped
    """

    def __init__(self, on_event: OnEvent | None = None):
        self.on_event: OnEvent = on_event or (lambda event: None)
        self._status = ""

    def status(self, text: str) -> None:
        """Report the current activity, if it has changed since the last report."""
        if text != self._status:
            self._status = text
            self.on_event(Event(kind="status", text=text))

    def phase(self, text: str) -> None:
        """Report the current activity of a run."""
        self.on_event(Event(kind="phase", text=text))

    def note(self, *texts: str) -> None:
        """Report things that a user should know."""
        for text in texts:
            self.on_event(Event(kind="note", text=text))

    def table(self, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Report a note with a table. Its text has the title and a line for each row.

        `rows`: dictionaries from column names to cells.
        """
        lines = [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in rows]
        self.on_event(Event(kind="note", text="\n".join([title, *lines]), data={"rows": rows}))

    def warning(self, text: str, where: str = "") -> None:
        """Report a warning for the user. `where`: the file, line or flag that caused it."""
        self.on_event(Event(kind="warning", text=text, data={"where": where} if where else {}))

    def stages(self, stages: Sequence[DataclassInstance]) -> None:
        """Report which ranks have which layers of a pipeline (`PipelineStage`)."""
        self.on_event(stages_event([asdict(stage) for stage in stages]))

    def result(self, text: str, data: Mapping[str, object]) -> None:
        """Report the result of one part of the work (a trial, a row)."""
        self.on_event(Event(kind="result", text=text, data=data))

    @contextmanager
    def task(self, text: str, total: int | None, unit: str) -> Iterator[Task]:
        """Report progress within the context. `total`: units in the task; None if unknown."""
        task = Task(self.on_event, text, total, unit)
        yield task
        task.end()
