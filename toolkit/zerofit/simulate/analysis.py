"""What a ledger says: the highest moments and what was alive at them, the timeline, host memory at its peak."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePath
from typing import Any

from zerofit.simulate.allocator import EmptyCache, Event
from zerofit.simulate.ledger import DEVICE, HOST, PINNED, Ledger, PhaseMark, Storage
from zerofit.simulate.record import KindPeak, MemoryPoint
from zerofit.spec.overhead import pinned_bytes

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # model.layers.17.mlp


def kind_peaks(ledger: Ledger) -> list[KindPeak]:
    """Return the highest moment of each kind on the device, highest first. Storages must be classified."""
    best: dict[tuple[Any, ...], tuple[int, int, dict[str, int]]] = {}  # key -> bytes, storage, breakdown
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
                best[key] = (live, index, {kind: size for kind, size in alive.items() if size})
    found = [_kind_peak(ledger.storages[index], size, parts) for size, index, parts in best.values()]
    return sorted(found, key=lambda m: -m.bytes)


def _kind_peak(storage: Storage, size: int, parts: dict[str, int]) -> KindPeak:
    at = place_in_code(storage)
    key = "|".join([storage.phase, str(storage.step), _LAYER.sub("*", storage.module), storage.op, at])
    largest_first = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return KindPeak(
        key=key,
        phase=storage.phase,
        step=storage.step,
        module=storage.module,
        at=at,
        bytes=size,
        breakdown=largest_first,
    )


def place_in_code(storage: Storage) -> str:
    """file:line of what allocated, e.g. "deepspeed/runtime/zero/stage3.py:782"; "" where nothing of Python ran."""
    if storage.code is None:
        return ""
    parts = PurePath(storage.code.co_filename).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else max(0, len(parts) - 3)
    return "/".join(parts[start:]) + f":{storage.line}"


def host_peak(ledger: Ledger) -> dict[str, int]:
    """Pageable and pinned bytes when host memory was highest, pinned ones as torch takes them from the host."""
    live: Counter[str] = Counter()
    highest = {HOST: 0, PINNED: 0}
    for index, change in ledger.events:
        place = ledger.storages[index].place
        if place in highest:
            live[place] += change if place == HOST else pinned_bytes(abs(change)) * (1 if change > 0 else -1)
            if live.total() > sum(highest.values()):
                highest = {HOST: live[HOST], PINNED: live[PINNED]}
    return {"pageable": highest[HOST], "pinned": highest[PINNED]}


def device_events(ledger: Ledger, workspaces: tuple[int, ...] = ()) -> list[Event]:
    """The device's allocations and releases in order, for `allocator.replay`.

    `workspaces` are bytes that torch takes for matrix products at the first forward and the first backward, and keeps.
    """
    firsts = {mark.name: mark.event for mark in reversed(ledger.marks)}
    kept = {
        firsts[name]: size for name, size in zip(("forward", "backward"), workspaces, strict=False) if name in firsts
    }
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
    """Device memory by kind over the run: of every stretch of events its highest moment, at most about `points`.

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
        if highest < 0 or alive.total() > highest:
            mark = marks[phase]
            point = MemoryPoint(t=number, phase=mark.name, step=mark.step, bytes=dict(+alive))
            found[-1 if highest >= 0 else len(found) :] = [point]
            highest = alive.total()
    return tuple(found)
