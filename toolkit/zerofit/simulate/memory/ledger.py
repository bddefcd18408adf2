"""Record the storages of a simulated rank.

Derive peaks, the timeline and the allocator's events.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import PurePath
from types import CodeType

from zerofit.simulate.memory.allocator import EmptyCache, Event, Note, Synchronized
from zerofit.simulate.memory.snapshot import Stack
from zerofit.simulate.record import KindPeak, MemoryPoint

DEVICE, HOST, PINNED, LOCKED = "device", "host", "pinned", "locked"  # LOCKED: page-locked, but not by torch
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # model.layers.17.mlp


@dataclass(slots=True)
class Storage:
    """One allocation. Its kind may be set later."""

    bytes: int
    place: str  # DEVICE, HOST, PINNED or LOCKED
    phase: str
    step: int
    op: str
    module: str  # the model's running module, "" outside of it
    code: CodeType | None  # the innermost function outside of torch; `line` is in it
    line: int
    recomputed: bool = False  # allocated in backward while a checkpoint is recomputed
    kind: str | None = None
    user_line: str = ""  # the user's innermost line, "file:line"; only at a new peak of the phase, or if large
    stream: int = 0  # the device's stream that allocated it
    stack: Stack = ()  # if recorded


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
    """The beginning of a phase. `event`: its index in the list of events."""

    event: int
    name: str
    step: int


# The ledger is a list of (storage, change in bytes). Everything else is computed from it afterwards:
# live bytes at a moment are the sum of the changes before it, so one pass gives peaks by kind, the timeline,
# host memory by phase (`memory.host`), and the messages for a replay of the caching allocator (`memory.allocator`).
# Storages are classified at the end (`memory.categories`), because their owner is often known only then.
class Ledger:
    """Records allocations (+bytes) and releases (-bytes) in order, and the peak of each place."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []  # (index of the storage, change in bytes)
        self.marks: list[PhaseMark] = []
        self.notes: list[tuple[int, Note]] = []  # other messages to the caching allocator, and the event they precede
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.highest = 0  # live bytes on the device, since `torch.cuda.reset_peak_memory_stats`
        self._going_over: tuple[int, int, int, int] | None = None  # next event, storage to be freed, peaks before

    def allocated(self, storage: Storage, instead: int | None = None) -> int:
        """Record an allocation. Return the storage's index.

        `instead`: an older storage's index. If the next event frees this storage, the new one reuses its memory.
        """
        before = self.peak[storage.place], self.highest
        self.storages.append(storage)
        self._change(len(self.storages) - 1, storage.bytes)
        if instead is not None:
            self._going_over = len(self.events), instead, *before
        return len(self.storages) - 1

    def resized(self, index: int, new_bytes: int) -> None:
        """Record a storage's new size."""
        change = new_bytes - self.storages[index].bytes
        self.storages[index].bytes = new_bytes
        self._change(index, change)

    def freed(self, index: int) -> None:
        """Record a release."""
        change = -self.storages[index].bytes
        # Autograd's sum of two gradients allocates its result before the older gradient is freed, but only while a
        # dispatch mode is active. On the real machine autograd adds in place, so the last two events are exchanged.
        if self._going_over is None or self._going_over[:2] != (len(self.events), index):
            self._change(index, change)
            return
        taker, size = self.events.pop()
        place = self.storages[taker].place
        self.live[place] -= size
        self.peak[place], self.highest = self._going_over[2:]
        self._change(index, change)
        self._change(taker, size)

    def pinned(self, index: int, place: str = PINNED) -> None:
        """Record that a storage is page-locked since its allocation.

        `place`: PINNED if torch locked it, else LOCKED.
        """
        storage = self.storages[index]
        self.live[HOST] -= storage.bytes
        self.live[place] += storage.bytes
        self.peak[place] = max(self.peak[place], self.live[place])
        storage.place = place

    def begin(self, name: str, step: int) -> None:
        """Record the beginning of a phase."""
        self.marks.append(PhaseMark(event=len(self.events), name=name, step=step))

    def empty_cache(self) -> None:
        """Record that the caching allocator releases unused segments."""
        self.note(EmptyCache())

    def note(self, note: Note) -> None:
        """Record an event of the caching allocator that neither allocates nor frees."""
        self.notes.append((len(self.events), note))

    def _change(self, index: int, change: int) -> None:
        place = self.storages[index].place
        self.events.append((index, change))
        self.live[place] += change
        self.peak[place] = max(self.peak[place], self.live[place])
        if place == DEVICE:
            self.highest = max(self.highest, self.live[place])


def _events(ledger: Ledger) -> Iterator[tuple[int, PhaseMark, Storage, int]]:
    """Yield for each event its number, its phase, the storage and the change in bytes."""
    marks, phase = [*ledger.marks, PhaseMark(event=len(ledger.events) + 1, name="", step=-1)], 0
    for number, (index, change) in enumerate(list(ledger.events)):  # garbage collection may add releases meanwhile
        while number >= marks[phase + 1].event:
            phase += 1
        yield number, marks[phase], ledger.storages[index], change


# A peak per line of code, not only the highest of all: when a model is extrapolated from a few layers
# (`forecast.run`), the line with the highest peak may differ from the line with all layers. The highest, the
# first and the last occurrence are kept, since each of these is linear in the number of layers. The phase is that of
# the event: a storage may grow again in a later phase than its first one, as FSDP's gathered parameters do.
def kind_peaks(ledger: Ledger) -> list[KindPeak]:
    """Return each kind's highest, first and last peak on the device.

    The peaks of all kinds are sorted together by bytes, largest first. Classify the storages before the call.
    """
    best: dict[tuple[object, ...], dict[str, _Moment]] = {}
    alive: Counter[str] = Counter()
    live = 0
    for _, mark, storage, change in _events(ledger):
        if storage.place != DEVICE:
            continue
        live += change
        alive[storage.kind or "other"] += change
        if change > 0:
            key = (mark.name, mark.step, _LAYER.sub("*", storage.module), storage.op, storage.code, storage.line)
            now = live, mark, storage, dict(alive)
            known = best.setdefault(key, {"": now, "first": now})
            known["last"] = now
            if live > known[""][0]:
                known[""] = now
    found = [_kind_peak(which, *moment) for moments in best.values() for which, moment in moments.items()]
    return sorted(found, key=lambda m: -m.bytes)


_Moment = tuple[int, PhaseMark, Storage, dict[str, int]]  # live bytes, phase, the last allocation, live bytes by kind


def _kind_peak(which: str, size: int, mark: PhaseMark, storage: Storage, parts: dict[str, int]) -> KindPeak:
    at = place_in_code(storage)
    return KindPeak(
        key="|".join([mark.name, str(mark.step), _LAYER.sub("*", storage.module), storage.op, at]),
        which=which,
        phase=mark.name,
        step=mark.step,
        module=storage.module,
        at=at,
        own=storage.user_line,
        bytes=size,
        breakdown=dict(sorted(filter(itemgetter(1), parts.items()), key=lambda item: -item[1])),
    )


def place_in_code(storage: Storage) -> str:
    """Return the line that allocated, e.g. "deepspeed/runtime/zero/stage3.py:782".

    Return "" if no Python was running.
    """
    if storage.code is None:
        return ""
    parts = PurePath(storage.code.co_filename).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else max(0, len(parts) - 3)
    return "/".join(parts[start:]) + f":{storage.line}"


# The allocator's list lacks the events of other places, and has the notes in between. So an index changes:
#
#   ledger     alloc host | alloc | free |            | alloc          Synchronized(before=3): 2 events of the device
#   allocator               alloc | free | Synchronized | alloc        Synchronized(before=2)
def device_events(ledger: Ledger) -> list[Event]:
    """Return the events of the device's caching allocator in order, for `allocator.replay`."""
    found: list[Event] = []
    places: list[int] = []  # index in `found` for each event of the ledger
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


# A run has up to millions of events, and a picture a few thousand pixels. So events are divided into intervals, which
# end at phases, too. Each interval is shown by its highest moment, since its mean would hide the peak.
def timeline(ledger: Ledger, points: int = 2000) -> tuple[MemoryPoint, ...]:
    """Return the device memory by kind over the run, at about `points` moments."""
    stretch = max(1, len(ledger.events) // points)
    found: list[tuple[int, PhaseMark, dict[str, int], Storage | None]] = []
    alive: Counter[str] = Counter()
    highest = -1
    for number, mark, storage, change in _events(ledger):
        on_device = storage.place == DEVICE
        if on_device:
            alive[storage.kind or "other"] += change
        if number % stretch == 0 or mark is not found[-1][1]:
            highest = -1
        if alive.total() > highest:
            if highest >= 0:
                found.pop()  # a lower moment of the same interval
            found.append((number, mark, dict(+alive), storage if on_device and change > 0 else None))
            highest = alive.total()
    return tuple(
        MemoryPoint(
            t=number,
            phase=mark.name,
            step=mark.step,
            bytes=kinds,
            module=storage.module if storage else "",
            at=storage.user_line or place_in_code(storage) if storage else "",
        )
        for number, mark, kinds, storage in found
    )
