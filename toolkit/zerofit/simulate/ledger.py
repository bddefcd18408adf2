"""Every storage that a simulated rank allocates: when, where, how large, what for, and when it is released."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import CodeType

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
    recomputed: bool = False  # in backward, for a checkpoint
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
    """Where a phase begins in the list of events."""

    event: int
    name: str
    step: int


class Ledger:
    """Storages and, in order, their allocation (+bytes) and release (-bytes); live and peak bytes by place."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []  # (index of the storage, change in bytes)
        self.marks: list[PhaseMark] = []
        self.emptied: list[int] = []  # before which events the device's cached memory was given back
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
        self.marks.append(PhaseMark(event=len(self.events), name=name, step=step))

    def empty_cache(self) -> None:
        """Note that the caching allocator gives back what it does not use."""
        self.emptied.append(len(self.events))

    def _change(self, index: int, change: int) -> None:
        place = self.storages[index].place
        self.events.append((index, change))
        self.live[place] += change
        if self.live[place] > self.peak[place]:
            self.peak[place] = self.live[place]
