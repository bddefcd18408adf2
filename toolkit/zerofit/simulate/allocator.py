"""The memory that torch reserves on the device for a sequence of allocations and releases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zerofit.simulate.alloc_conf import AllocatorSettings
from zerofit.simulate.caching import CachingAllocator, segment_bytes
from zerofit.simulate.expandable import ExpandableAllocator


@dataclass(frozen=True)
class EmptyCache:
    """An event: torch.cuda.empty_cache()."""


@dataclass(frozen=True)
class PhaseEnd:
    """An event: note what is reserved here."""

    name: str


@dataclass(frozen=True, kw_only=True)
class RecordStream:
    """An event: a stream uses a storage that was allocated on another one (Tensor.record_stream)."""

    storage: int
    stream: int


@dataclass(frozen=True, kw_only=True)
class Synchronized:
    """An event: the host knows that a stream (None: every one) has done what it had to do before a moment."""

    stream: int | None
    before: int  # number of an event


_RESIZED = -1  # stands for a storage while it has two blocks

Note = EmptyCache | RecordStream | Synchronized
# (storage from 0 on, change in bytes[, stream on which it is allocated])
Event = tuple[int, int] | tuple[int, int, int] | Note | PhaseEnd


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The first allocation that failed, after cached segments had been given back."""

    event: int  # its place among the events
    asked_bytes: int  # as rounded for the driver: torch's "Tried to allocate"
    allocated_bytes: int
    reserved_bytes: int


@dataclass(kw_only=True)
class AtPhaseEnd:
    """Memory as a PhaseEnd event found it."""

    name: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(kw_only=True)
class Reserved:
    """The result of a replay. With an out of memory, everything up to there: a run ends with it."""

    peak_allocated_bytes: int = 0  # as torch.cuda.max_memory_allocated: blocks, which are rounded
    peak_reserved_bytes: int = 0  # as torch.cuda.max_memory_reserved
    end_reserved_bytes: int = 0
    phase_ends: list[AtPhaseEnd] = field(default_factory=list)
    flushes: int = 0  # num_alloc_retries: cached segments were given back because the device was full
    out_of_memory: OutOfMemory | None = None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak beyond the allocated one."""
        return 1 - self.peak_allocated_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0


def replay(
    events: Iterable[Event],
    *,
    device_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    host_ahead: bool = True,
) -> Reserved:
    """Replay a device's allocations and releases in their order.

    With `host_ahead`, a block that another stream uses comes back when the host knows that stream to be done, which is
    the latest; without, at once, as where the device keeps up with the host.

    A positive change allocates or grows a storage, a negative one shrinks or releases it; resizing holds the old block
    until the new one is there, as at::native::resize_bytes_cuda does. `device_bytes` is what is left to the allocator:
    the device's memory less the context and what else does not go through it.
    """
    settings = settings or AllocatorSettings()
    allocator = (ExpandableAllocator if settings.expandable_segments else CachingAllocator)(device_bytes, settings)
    found = Reserved()
    sizes: dict[int, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            if not _change(allocator, sizes, number, *event):
                found.out_of_memory = OutOfMemory(
                    event=number,
                    asked_bytes=segment_bytes(settings.rounded_bytes(sizes[event[0]])),
                    allocated_bytes=allocator.allocated_bytes,
                    reserved_bytes=allocator.reserved_bytes,
                )
                break
        elif isinstance(event, EmptyCache):
            allocator.empty_cache()
        elif isinstance(event, RecordStream):
            if host_ahead:
                allocator.record_stream(event.storage, event.stream)
        elif isinstance(event, Synchronized):
            allocator.synchronized(event.stream, event.before)
        else:
            at_end = {"allocated_bytes": allocator.allocated_bytes, "reserved_bytes": allocator.reserved_bytes}
            found.phase_ends.append(AtPhaseEnd(name=event.name, **at_end))
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "flushes"):
        setattr(found, name, getattr(allocator, name))
    found.end_reserved_bytes = allocator.reserved_bytes
    return found


def _change(
    allocator: CachingAllocator, sizes: dict[int, int], number: int, storage: int, change: int, stream: int = 0
) -> bool:
    """Apply the event of this number; return False where it does not fit."""
    old = sizes.get(storage, 0)
    new = sizes[storage] = old + change
    if not new:
        del sizes[storage]
        allocator.release(storage, number)
        return True
    if not old:
        return allocator.allocate(storage, new, stream)
    moved = allocator.allocate(_RESIZED, new, stream)
    if moved:
        allocator.release(storage, number)
        allocator.live[storage] = allocator.live.pop(_RESIZED)
    return moved
