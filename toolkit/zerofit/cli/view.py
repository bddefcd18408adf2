"""What a person sees of a run: one live bar at a terminal, plain lines elsewhere. Reads only the run folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from zerofit.spec.run_folder import RunFolder

QUIET_S = 15.0  # without a terminal, a phase that lasts says so this often


class JsonlTail:
    """Whole lines of a growing JSON lines file, each once; not those that it has by now."""

    def __init__(self, path: Path):
        self._path, self._offset = path, path.stat().st_size if path.exists() else 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The objects that have been added since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                yield json.loads(line)


class RunView:
    """Shows a run's events and metrics while they are written."""

    def __init__(self, folder: RunFolder, log_every: int):
        self._metrics, self._events = JsonlTail(folder.metrics), JsonlTail(folder.events)
        self._log_every = log_every
        self._console = Console(stderr=True, highlight=False)
        self._live = sys.stderr.isatty()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("[yellow]{task.fields[ranks]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting the ranks", total=None, figures="", ranks="")
        self._ranks = ""
        self._phase, self._since = "", time.monotonic()

    def __enter__(self) -> RunView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, ranks: str = "") -> None:
        """Show what is new since the last call. `ranks`: how the ranks are, where that is worth a word."""
        self._show_ranks(ranks)
        for record in self._metrics.read():
            self._on_record(record)
        for event in self._events.read():
            self._on_event(event)
        if self._phase:
            self.phase(self._phase)

    def phase(self, text: str) -> None:
        """Say what is being done; a text that differs only in the seconds behind it is repeated now and then."""
        if self._live:
            self._bar.update(self._task, description=text)
        elif _topic(text) != _topic(self._phase) or time.monotonic() - self._since > QUIET_S:
            self._console.print(text + " ...")
            self._since = time.monotonic()
        self._phase = text

    def _show_ranks(self, text: str) -> None:
        if self._live:
            self._bar.update(self._task, ranks=text)
        elif text and _topic(text) != _topic(self._ranks):
            self._console.print(text, soft_wrap=True)
        self._ranks = text

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "training":
            self._bar.update(self._task, total=event["steps"], description="training")
            if "done" in event:
                self._bar.update(self._task, completed=event["done"])
            self._phase = ""
        elif event["event"] == "saved":
            self._console.print(f"step {event['step']}: checkpoint saved in {event['save_s']:.1f} s")
        elif event["event"] == "save-failed":
            self._console.print(f"[yellow]warning[/]: step {event['step']}: {event['text']}", soft_wrap=True)
        elif event["event"] == "eval":
            figures = ", ".join(f"{k} {v:.4g}" for k, v in event.items() if k not in ("event", "time_s", "step"))
            self._console.print(f"step {event['step']}: validation {figures}")
            self._bar.update(self._task, description="training")
            self._phase = ""
        elif event["event"] == "phase":
            self.phase(event["text"])

    def _on_record(self, record: dict[str, Any]) -> None:
        if self._live:
            self._bar.update(self._task, completed=record["step"], figures=_figures(record))
        elif record["step"] == 1 or record["step"] % self._log_every == 0:
            self._console.print(f"step {record['step']}: {_figures(record)}", soft_wrap=True)
            self._since = time.monotonic()


def _topic(text: str) -> str:
    return text.partition(" (")[0]


def _figures(record: dict[str, Any]) -> str:
    rate = ("tokens/s", record["tokens_per_s"]) if record["tokens_per_s"] else ("samples/s", record["samples_per_s"])
    parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"{rate[1]:,.0f} {rate[0]}"]
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join([*parts, f"{record['memory_bytes'] / 2**30:.2f} GiB"])
