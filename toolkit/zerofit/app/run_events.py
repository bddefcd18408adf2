"""Events of a run, read from the files in its folder while the ranks write them."""

from __future__ import annotations

import time
from typing import Any

from zerofit.spec.events import Event, Reporter
from zerofit.spec.jsonl import JsonlTail
from zerofit.spec.run_folder import RunFolder

REPEAT_S = 15.0  # a phase that lasts is told again this often


class RunEvents:
    """Tells what the ranks of one start have written since the last look."""

    def __init__(self, folder: RunFolder, report: Reporter):
        self._report = report
        self._metrics = JsonlTail(folder.metrics, on_bad_line=report.warning)
        self._events = JsonlTail(folder.events, on_bad_line=report.warning)
        self._ranks, self._steps = "", None
        self._phase, self._told = "", time.monotonic()

    def look(self, ranks: str) -> None:
        """Tell what is new. `ranks`: how the ranks are, empty where there is nothing to say."""
        if ranks != self._ranks:
            self._ranks = ranks
            self._report.on_event(Event(kind="ranks", text=ranks))
        for record in self._metrics.read():
            self._tell(metrics_event(record, self._steps))
        for line in self._events.read():
            event = _event_of(line)
            if event is not None:
                self._tell(event)
        if self._phase and time.monotonic() - self._told > REPEAT_S:
            self.phase(self._phase)

    def phase(self, text: str) -> None:
        """Tell what is being done now."""
        self._tell(Event(kind="phase", text=text))

    def _tell(self, event: Event) -> None:
        if event.kind == "training":
            self._steps = event.data.get("steps")
        if event.kind in ("phase", "training", "evaluated"):
            self._phase, self._told = event.text if event.kind == "phase" else "", time.monotonic()
        self._report.on_event(event)


def metrics_event(record: dict[str, Any], steps: int | None) -> Event:
    """Return the event of one record of metrics.jsonl; `steps`: of the whole run, where known."""
    parts = []
    for name, shape in (("loss", "loss {:.4f}"), ("lr", "lr {:.2e}")):
        parts += _shown(record, name, shape)
    parts += _shown(record, "tokens_per_s", "{:,.0f} tokens/s") or _shown(record, "samples_per_s", "{:,.0f} samples/s")
    parts += _shown(record, "mfu", "MFU {:.1%}")
    parts += _shown({"gib": record.get("memory_bytes", 0) / 2**30}, "gib", "{:.2f} GiB")
    step = record.get("step", 0)
    return Event(
        kind="metrics", text=f"step {step}: {'  '.join(parts)}", done=step, total=steps, unit="steps", data=record
    )


def _shown(record: dict[str, Any], name: str, shape: str) -> list[str]:
    return [] if record.get(name) is None else [shape.format(record[name])]


def _event_of(line: dict[str, Any]) -> Event | None:
    """Return the event of one line of events.jsonl; None for kinds that nobody shows."""
    data = {key: value for key, value in line.items() if key not in ("event", "time_s", "text")}
    kind, text = line.get("event"), line.get("text", "")
    step = f"step {data.get('step')}"
    if kind == "phase":
        return Event(kind="phase", text=text)
    if kind == "training":
        return Event(kind="training", text="training", data=data)
    if kind == "saved":
        return Event(kind="saved", text=f"{step}: checkpoint saved in {data.get('save_s', 0.0):.1f} s", data=data)
    if kind == "save-failed":
        return Event(kind="warning", text=f"{step}: {text}", data=data)
    if kind == "eval":
        figures = ", ".join(f"{name} {value:.4g}" for name, value in data.items() if name != "step")
        return Event(kind="evaluated", text=f"{step}: validation {figures}", data=data)
    return None
