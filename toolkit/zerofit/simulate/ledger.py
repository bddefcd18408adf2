"""Storages that a simulated rank allocates, and what they say: highest moments, timeline, host memory's peak."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType
from typing import Any

from zerofit.simulate.allocator import EmptyCache, Event
from zerofit.simulate.record import KindPeak, MemoryPoint
from zerofit.spec.overhead import pinned_bytes

DEVICE, HOST, PINNED = "device", "host", "pinned"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # model.layers.17.mlp


@dataclass(slots=True)
class Storage:
    """One allocation. Its kind may be known only later."""

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
    own: str = ""  # the user's innermost line, "file:line", where memory was higher than before in its phase


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
        self.emptied: list[int] = []  # before which events the device's cached memory was given back
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def allocated(self, storage: Storage) -> int:
        """Note an allocation; return its index."""
        self.storages.append(storage)
        self._change(len(self.storages) - 1, storage.bytes)
        return len(self.storages) - 1

    def resized(self, index: int, new_bytes: int) -> None:
        """Note that a storage has another size now."""
        change = new_bytes - self.storages[index].bytes
        self.storages[index].bytes = new_bytes
        self._change(index, change)

    def freed(self, index: int) -> None:
        """Note a release."""
        self._change(index, -self.storages[index].bytes)

    def pinned(self, index: int) -> None:
        """Note that a storage in host memory was pinned from the start."""
        storage = self.storages[index]
        self.live[HOST] -= storage.bytes
        self.live[PINNED] += storage.bytes
        self.peak[PINNED] = max(self.peak[PINNED], self.live[PINNED])
        storage.place = PINNED

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
        self.peak[place] = max(self.peak[place], self.live[place])


def kind_peaks(ledger: Ledger) -> list[KindPeak]:
    """Return the highest moment of each kind on the device, highest first. Storages must be classified."""
    best: dict[tuple[Any, ...], tuple[int, Storage, dict[str, int]]] = {}
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
            if key not in best or live > best[key][0]:
                best[key] = (live, storage, {kind: size for kind, size in alive.items() if size})
    found = [_kind_peak(storage, size, parts) for size, storage, parts in best.values()]
    return sorted(found, key=lambda m: -m.bytes)


def _kind_peak(storage: Storage, size: int, parts: dict[str, int]) -> KindPeak:
    at = _place_in_code(storage)
    return KindPeak(
        key="|".join([storage.phase, str(storage.step), _LAYER.sub("*", storage.module), storage.op, at]),
        phase=storage.phase,
        step=storage.step,
        module=storage.module,
        at=at,
        own=storage.own,
        bytes=size,
        breakdown=dict(sorted(parts.items(), key=lambda item: -item[1])),
    )


def _place_in_code(storage: Storage) -> str:
    """Return what allocated, e.g. "deepspeed/runtime/zero/stage3.py:782"; "" where nothing of Python ran."""
    if storage.code is None:
        return ""
    parts = PurePath(storage.code.co_filename).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else max(0, len(parts) - 3)
    return "/".join(parts[start:]) + f":{storage.line}"


def host_peak(ledger: Ledger) -> dict[str, int]:
    """Return pageable and pinned bytes when host memory was highest, pinned ones as torch takes them from the host."""
    live: Counter[str] = Counter()
    highest = {HOST: 0, PINNED: 0}
    for index, change in ledger.events:
        place = ledger.storages[index].place
        if place in highest:
            live[place] += change if place == HOST else pinned_bytes(abs(change)) * (1 if change > 0 else -1)
            if live.total() > sum(highest.values()):
                highest = {HOST: live[HOST], PINNED: live[PINNED]}
    return {"pageable": highest[HOST], "pinned": highest[PINNED]}


def host_peaks(ledger: Ledger) -> dict[str, int]:
    """Return the most bytes of host memory in each phase, of any step, as torch takes them from the host."""
    found: Counter[str] = Counter()
    live, phase = 0, -1
    for number, (index, change) in enumerate(ledger.events):
        while phase + 1 < len(ledger.marks) and number >= ledger.marks[phase + 1].event:
            phase += 1
            found[ledger.marks[phase].name] = max(found[ledger.marks[phase].name], live)
        place = ledger.storages[index].place
        if place != DEVICE:
            live += change if place == HOST else pinned_bytes(abs(change)) * (1 if change > 0 else -1)
        if phase >= 0:
            found[ledger.marks[phase].name] = max(found[ledger.marks[phase].name], live)
    return dict(found)


def device_events(ledger: Ledger, workspaces: tuple[int, ...] = ()) -> list[Event]:
    """Return the device's allocations and releases in order, for `allocator.replay`.

    `workspaces` are bytes that torch takes for matrix products at the first forward and the first backward, and keeps.
    """
    firsts = {mark.name: mark.event for mark in reversed(ledger.marks)}
    sizes = zip(("forward", "backward"), workspaces, strict=False)
    kept = {firsts[name]: size for name, size in sizes if name in firsts}
    emptied = set(ledger.emptied)
    found: list[Event] = []
    for number, (index, change) in enumerate(ledger.events):
        if number in emptied:
            found.append(EmptyCache())
        if number in kept:
            found.append((len(ledger.storages) + number, kept[number]))
        if ledger.storages[index].place == DEVICE and change:
            found.append((index, change))
    return found


def timeline(ledger: Ledger, points: int = 2000) -> tuple[MemoryPoint, ...]:
    """Return device memory by kind over the run: of every stretch of events its highest moment, at most about `points`.

    A stretch never spans two phases.
    """
    stretch = max(1, len(ledger.events) // points)
    marks = [*ledger.marks, PhaseMark(event=len(ledger.events) + 1, name="", step=-1)]
    found: list[MemoryPoint] = []
    alive: Counter[str] = Counter()
    phase, highest = 0, -1
    for number, (index, change) in enumerate(ledger.events):
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
