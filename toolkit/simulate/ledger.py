"""Every storage that a simulated rank allocates: when, where, how large, what for, and when it is released."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import CodeType
from typing import Any

DEVICE, HOST, PINNED = "device", "host", "pinned"


@dataclass(slots=True)
class Storage:
    """One allocation. Its kind may be settled later than its birth."""

    bytes: int
    place: str  # DEVICE, HOST or PINNED
    phase: str
    step: int
    op: str
    module: str  # the model's module that was running, "" outside of it
    code: CodeType | None  # the innermost function outside of torch, and its line
    line: int
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a phase begins in the list of events."""

    event: int
    name: str
    step: int


class Ledger:
    """Storages and, in order, their allocation (+bytes) and release (-bytes); live and peak bytes by place."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []  # (index of the storage, change in bytes)
        self.marks: list[Mark] = []
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def born(self, storage: Storage) -> int:
        """Note an allocation; its index."""
        self.storages.append(storage)
        self._change(len(self.storages) - 1, storage.bytes)
        return len(self.storages) - 1

    def resized(self, index: int, new_bytes: int) -> None:
        """Note that a storage has another size now."""
        change = new_bytes - self.storages[index].bytes
        self.storages[index].bytes = new_bytes
        self._change(index, change)

    def died(self, index: int) -> None:
        """Note a release."""
        self._change(index, -self.storages[index].bytes)

    def moved(self, index: int, place: str) -> None:
        """Note that host memory was pinned from the start."""
        storage = self.storages[index]
        self.live[storage.place] -= storage.bytes
        self.live[place] += storage.bytes
        self.peak[place] = max(self.peak[place], self.live[place])
        storage.place = place

    def begin(self, name: str, step: int) -> None:
        """Mark the beginning of a phase."""
        self.marks.append(Mark(event=len(self.events), name=name, step=step))

    def _change(self, index: int, change: int) -> None:
        place = self.storages[index].place
        self.events.append((index, change))
        self.live[place] += change
        if self.live[place] > self.peak[place]:
            self.peak[place] = self.live[place]


def alive_after(ledger: Ledger, event: int, place: str) -> dict[int, int]:
    """Index of each storage of a place that is alive after an event, and its bytes then."""
    alive: dict[int, int] = {}
    for index, change in ledger.events[: event + 1]:
        if ledger.storages[index].place == place:
            alive[index] = alive.get(index, 0) + change
            if not alive[index]:
                del alive[index]
    return alive


def peak_event(ledger: Ledger, place: str, start: int = 0) -> int:
    """The event, from `start` on, after which most bytes of a place were alive; the first of equals."""
    live = most = 0
    at = start
    for number, (index, change) in enumerate(ledger.events):
        if ledger.storages[index].place == place:
            live += change
            if number >= start and live > most:
                most, at = live, number
    return at


def by_kind(ledger: Ledger, alive: dict[int, int]) -> dict[str, int]:
    """Bytes of these storages by their kind, largest first."""
    sums: Counter[str] = Counter()
    for index, size in alive.items():
        sums[ledger.storages[index].kind or "other"] += size
    return dict(sums.most_common())


def timeline(ledger: Ledger, place: str, points: int) -> list[dict[str, Any]]:
    """Bytes by kind at this many moments (fewer where there are fewer events), each stretch's highest."""
    of_place = [n for n, (index, _) in enumerate(ledger.events) if ledger.storages[index].place == place]
    stretch = max(1, len(of_place) // points)
    sums: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    highest, seen = -1, 0
    marks = iter([*ledger.marks, Mark(event=len(ledger.events) + 1, name="", step=-1)])
    mark, following = None, next(marks)
    for number in of_place:
        while number >= following.event:
            mark, following = following, next(marks)
            highest, seen = -1, 0
        index, change = ledger.events[number]
        sums[ledger.storages[index].kind or "other"] += change
        total = sums.total()
        if seen % stretch == 0:
            highest = -1
        if total > highest:
            row = {"t": number, "phase": mark.name if mark else "", "step": mark.step if mark else -1}
            row["bytes"] = {kind: size for kind, size in sums.items() if size}
            if highest < 0:
                rows.append(row)
            else:
                rows[-1] = row
            highest = total
        seen += 1
    return rows
