"""Storages that a simulated rank allocates, and what they say: highest moments, timeline, host memory's peak."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import itemgetter
from pathlib import PurePath
from types import CodeType
from typing import Any

from zerofit.simulate.allocator import EmptyCache, Event, Note, Synchronized
from zerofit.simulate.record import KindPeak, MemoryPoint

DEVICE, HOST, PINNED, LOCKED = "device", "host", "pinned", "locked"  # LOCKED: page-locked, and not by torch
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # model.layers.17.mlp


@dataclass(slots=True)
class Storage:
    """One allocation. Its kind may be known only later."""

    bytes: int
    place: str  # DEVICE, HOST, PINNED or LOCKED
    phase: str
    step: int
    op: str
    module: str  # the model's module that was running, "" outside of it
    code: CodeType | None  # the innermost function outside of torch, and its line
    line: int
    recomputed: bool = False  # in backward, for a checkpoint
    kind: str | None = None
    own: str = ""  # the user's innermost line, "file:line", where memory was higher than before in its phase
    stream: int = 0  # of the device, on which it was allocated


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
    """The place in the list of events where a phase begins."""

    event: int
    name: str
    step: int


class Ledger:
    """Storages and, in order, their allocation (+bytes) and release (-bytes); live and peak bytes by place."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []  # (index of the storage, change in bytes)
        self.marks: list[PhaseMark] = []
        self.notes: list[tuple[int, Note]] = []  # what else the caching allocator hears, and before which event
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._going_over: tuple[int, int, int] | None = None  # the next event, a storage, the peak without the last one

    def allocated(self, storage: Storage, instead: int | None = None) -> int:
        """Note an allocation; return its index. If the storage `instead` is released next, it takes its memory."""
        before = self.peak[storage.place]
        self.storages.append(storage)
        self._change(len(self.storages) - 1, storage.bytes)
        if instead is not None:
            self._going_over = len(self.events), instead, before
        return len(self.storages) - 1

    def resized(self, index: int, new_bytes: int) -> None:
        """Note that a storage has another size now."""
        change = new_bytes - self.storages[index].bytes
        self.storages[index].bytes = new_bytes
        self._change(index, change)

    def freed(self, index: int) -> None:
        """Note a release."""
        change = -self.storages[index].bytes
        if self._going_over is None or self._going_over[:2] != (len(self.events), index):
            self._change(index, change)
            return
        taker, size = self.events.pop()
        place = self.storages[taker].place
        self.live[place] -= size
        self.peak[place] = self._going_over[2]
        self._change(index, change)
        self._change(taker, size)

    def pinned(self, index: int, place: str = PINNED) -> None:
        """Note that a storage in host memory was page-locked from the start, by torch or not (LOCKED)."""
        storage = self.storages[index]
        self.live[HOST] -= storage.bytes
        self.live[place] += storage.bytes
        self.peak[place] = max(self.peak[place], self.live[place])
        storage.place = place

    def begin(self, name: str, step: int) -> None:
        """Mark the beginning of a phase."""
        self.marks.append(PhaseMark(event=len(self.events), name=name, step=step))

    def empty_cache(self) -> None:
        """Note that the caching allocator gives back what it does not use."""
        self.note(EmptyCache())

    def note(self, note: Note) -> None:
        """Note what the caching allocator hears at this moment."""
        self.notes.append((len(self.events), note))

    def _change(self, index: int, change: int) -> None:
        place = self.storages[index].place
        self.events.append((index, change))
        self.live[place] += change
        self.peak[place] = max(self.peak[place], self.live[place])


def kind_peaks(ledger: Ledger) -> list[KindPeak]:
    """Return the highest moment of each kind on the device, its first and its last one, highest first.

    Storages must be classified.
    """
    best: dict[tuple[Any, ...], dict[str, _Moment]] = {}
    alive: Counter[str] = Counter()
    live = 0
    for index, change in ledger.events:
        storage = ledger.storages[index]
        if storage.place != DEVICE:
            continue
        live += change
        alive[storage.kind or "other"] += change
        if change > 0:
            key = (storage.phase, storage.step, _LAYER.sub("*", storage.module), storage.op, storage.code, storage.line)
            now = live, storage, dict(alive)
            known = best.get(key)
            if known is None:
                best[key] = {"": now, "first": now, "last": now}
            else:
                known["last"] = now
                if live > known[""][0]:
                    known[""] = now
    found = [_kind_peak(which, *moment) for moments in best.values() for which, moment in moments.items()]
    return sorted(found, key=lambda m: -m.bytes)


_Moment = tuple[int, Storage, dict[str, int]]  # bytes alive, what was allocated last, bytes by kind


def _kind_peak(which: str, size: int, storage: Storage, parts: dict[str, int]) -> KindPeak:
    at = place_in_code(storage)
    return KindPeak(
        key="|".join([storage.phase, str(storage.step), _LAYER.sub("*", storage.module), storage.op, at]),
        which=which,
        phase=storage.phase,
        step=storage.step,
        module=storage.module,
        at=at,
        own=storage.own,
        bytes=size,
        breakdown=dict(sorted(filter(itemgetter(1), parts.items()), key=lambda item: -item[1])),
    )


def place_in_code(storage: Storage) -> str:
    """Return what allocated, e.g. "deepspeed/runtime/zero/stage3.py:782"; "" where nothing of Python ran."""
    if storage.code is None:
        return ""
    parts = PurePath(storage.code.co_filename).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else max(0, len(parts) - 3)
    return "/".join(parts[start:]) + f":{storage.line}"


def device_events(ledger: Ledger) -> list[Event]:
    """Return what the device's caching allocator hears, in order, for `allocator.replay`."""
    found: list[Event] = []
    places: list[int] = []  # of the ledger's moments in what is returned
    notes: defaultdict[int, list[Note]] = defaultdict(list)
    for moment, note in ledger.notes:
        notes[moment].append(note)
    for moment in range(len(ledger.events) + 1):
        places.append(len(found))
        for note in notes[moment]:
            if isinstance(note, Synchronized):
                note = Synchronized(stream=note.stream, before=places[note.before])
            found.append(note)
        if moment < len(ledger.events):
            index, change = ledger.events[moment]
            if change and ledger.storages[index].place == DEVICE:
                found.append((index, change, ledger.storages[index].stream))
    return found


def timeline(ledger: Ledger, points: int = 2000) -> tuple[MemoryPoint, ...]:
    """Return device memory by kind over the run: of every stretch of events its highest moment, at most about `points`.

    A stretch never spans two phases.
    """
    events = list(ledger.events)  # garbage that is collected meanwhile adds to them
    stretch = max(1, len(events) // points)
    marks = [*ledger.marks, PhaseMark(event=len(events) + 1, name="", step=-1)]
    found: list[MemoryPoint] = []
    alive: Counter[str] = Counter()
    phase, highest = 0, -1
    for number, (index, change) in enumerate(events):
        while number >= marks[phase + 1].event:
            phase, highest = phase + 1, -1
        storage = ledger.storages[index]
        if storage.place == DEVICE:
            alive[storage.kind or "other"] += change
        if number % stretch == 0:
            highest = -1
        if alive.total() > highest:
            if highest >= 0:
                found.pop()  # of this stretch, and lower
            found.append(MemoryPoint(t=number, phase=marks[phase].name, step=marks[phase].step, bytes=dict(+alive)))
            highest = alive.total()
    return tuple(found)
