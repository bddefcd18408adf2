"""Events: what work tells while it goes on, shown by the command line and handed to `on_event` in Python."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal[
    "status",  # what is being done now; takes the place of the status before
    "phase",  # a status of a run that is worth a line of its own where there is no terminal
    "task",  # work of a known kind of unit: `done` of `total`
    "note",  # something a user should know
    "warning",  # something a user should look at; `data["where"]` says where
    "result",  # of one part of the work, a trial or a row: `data` has its figures
    "stages",  # where the layers of a pipeline go: `data["stages"]` has a row for each stage
    "ranks",  # how the ranks of a run are, where that is worth a word; empty: as they should be
    "training",  # ranks begin to train: `data` has steps, and done where a run goes on
    "metrics",  # one record of metrics.jsonl
    "saved",  # a checkpoint is visible: step, save_s
    "text",  # a piece of the text that a model generates
    "evaluated",  # figures of an evaluation: step, loss, accuracy or perplexity
    "checks",  # findings about hosts before a start: `data` has checks (doctor's rows) and the number of hosts
]
TELL_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened: what `on_event` is called with, and what the command line shows.

    >>> event = Event(kind="saved", text="step 20: checkpoint saved in 0.3 s", data={"step": 20, "save_s": 0.3})
    >>> print(event)
    step 20: checkpoint saved in 0.3 s
    >>> event.data["step"]
    20
    """

    kind: Kind
    text: str = ""
    done: int = 0  # units of a task so far
    total: int | None = None  # units of a task in all, None where nobody knows
    unit: str = ""  # "bytes", "images", "parameters"
    ended: bool = False  # the task is over
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def stages_event(stages: Sequence[Mapping[str, Any]]) -> Event:
    """Return the event of a pipeline's stages, each `PipelineStage` as a dictionary."""
    return Event(kind="stages", text=f"layers on {len(stages)} pipeline stages", data={"stages": stages})


OnEvent = Callable[[Event], None]


class Task:
    """A piece of work under way, which is told of ten times a second at most."""

    def __init__(self, on_event: OnEvent, text: str, total: int | None, unit: str):
        self._on_event, self._text, self._total, self._unit = on_event, text, total, unit
        self._done, self._told = 0, time.monotonic()
        self._tell()

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        self._done += n
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            self._tell()

    def end(self) -> None:
        """Tell that the work is over."""
        self._tell(ended=True)

    def _tell(self, ended: bool = False) -> None:
        self._on_event(
            Event(kind="task", text=self._text, done=self._done, total=self._total, unit=self._unit, ended=ended)
        )


def shielded(on_event: OnEvent) -> OnEvent:
    """Return a callback that logs the first exception of `on_event` instead of raising: showing must not end a run."""
    failed = False

    def tell(event: Event) -> None:
        nonlocal failed
        try:
            on_event(event)
        except Exception:
            if not failed:
                logging.getLogger(__name__).exception("showing an event failed (told once); the run goes on")
            failed = True

    return tell


class Reporter:
    """Sends events to whoever listens; silent where nobody does.

    >>> report = Reporter(lambda event: print(event.kind, event.text))
    >>> report.note("2 images were skipped")
    note 2 images were skipped
    """

    def __init__(self, on_event: OnEvent | None = None):
        self.on_event: OnEvent = on_event or (lambda event: None)
        self._status = ""

    def status(self, text: str) -> None:
        """Tell what is being done now, unless that was told last."""
        if text != self._status:
            self._status = text
            self.on_event(Event(kind="status", text=text))

    def phase(self, text: str) -> None:
        """Tell what a run is doing now."""
        self.on_event(Event(kind="phase", text=text))

    def note(self, text: str) -> None:
        """Tell something that a user should know."""
        self.on_event(Event(kind="note", text=text))

    def warning(self, text: str, where: str = "") -> None:
        """Tell something that a user should look at, and where it stands."""
        self.on_event(Event(kind="warning", text=text, data={"where": where} if where else {}))

    def stages(self, stages: Sequence[Any]) -> None:
        """Tell which ranks hold which layers of a pipeline (`PipelineStage`)."""
        self.on_event(stages_event([asdict(stage) for stage in stages]))

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """Tell what a part of the work, a trial or a row, has come to."""
        self.on_event(Event(kind="result", text=text, data=data))

    @contextmanager
    def task(self, text: str, total: int | None, unit: str) -> Iterator[Task]:
        """Tell of a piece of work while the context lasts; `total` units in all (None: unknown)."""
        task = Task(self.on_event, text, total, unit)
        yield task
        task.end()
