"""Replay allocations and releases to find how much memory torch reserves on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofit.simulate.memory.alloc_conf import AllocatorSettings
from zerofit.simulate.memory.caching import CachingAllocator, ExpandableAllocator, segment_bytes


@dataclass(frozen=True)
class EmptyCache:
    """An event: torch.cuda.empty_cache() was called."""


@dataclass(frozen=True, kw_only=True)
class RecordStream:
    """An event: a stream uses a storage of another stream (Tensor.record_stream)."""

    storage: int
    stream: int


@dataclass(frozen=True, kw_only=True)
class Synchronized:
    """An event: the host has waited for a stream (`stream` None: for every stream).

    The host has waited only for work that was issued before the event with the number `before`.
    """

    stream: int | None
    before: int  # number of an event


RESIZED = -1  # the key of a storage's second block while it is resized

Note = EmptyCache | RecordStream | Synchronized
# (number of the storage, change in bytes[, stream that allocates it])
Event = tuple[int, int] | tuple[int, int, int] | Note


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The first allocation that failed, even after cached segments were released."""

    event: int  # index of the event
    asked_bytes: int  # as rounded for the driver: torch's "Tried to allocate"
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The result of a replay. The replay stops at the first allocation that runs out of memory."""

    peak_allocated_bytes: int  # as torch.cuda.max_memory_allocated: blocks, which are rounded
    peak_reserved_bytes: int  # as torch.cuda.max_memory_reserved
    flushes: int  # num_alloc_retries: cached segments were returned because the device was full
    out_of_memory: OutOfMemory | None


# Reserved bytes depend on the order of all allocations, so they are replayed with the rules of torch's allocator
# (`caching`). The host's lead over the device is unknown. Two replays give both ends:
#
#   host_ahead=False   the device keeps up: a released block is free at once       the likely reserved peak
#   host_ahead=True    a block that another stream used is free after a wait       the highest reserved peak
def replay(
    events: Iterable[Event],
    *,
    device_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    host_ahead: bool = True,
    allocator: CachingAllocator | None = None,
) -> Reserved:
    """Replay the allocations and releases of a device in order.

    A positive change allocates or grows a storage, a negative one shrinks or frees it. `host_ahead`: a block that
    another stream uses is freed only after the host has waited for that stream. `device_bytes`: the device's memory
    without the context and other uses outside of the allocator. `allocator`: an allocator to use instead of a new one,
    e.g. one that records its actions.
    """
    settings = settings or AllocatorSettings()
    if allocator is None:
        allocator = (ExpandableAllocator if settings.expandable_segments else CachingAllocator)(device_bytes, settings)
    sizes: dict[int, int] = {}
    out_of_memory = None
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            if not _change(allocator, sizes, number, *event):
                out_of_memory = OutOfMemory(
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
        else:
            allocator.synchronized(event.stream, event.before)
    return Reserved(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        flushes=allocator.flushes,
        out_of_memory=out_of_memory,
    )


def _change(
    allocator: CachingAllocator, sizes: dict[int, int], number: int, storage: int, change: int, stream: int = 0
) -> bool:
    """Apply an allocation or a release. Return False if an allocation does not fit."""
    old = sizes.get(storage, 0)
    new = sizes[storage] = old + change
    if not new:
        del sizes[storage]
        allocator.release(storage, number)
        return True
    if not old:
        return allocator.allocate(storage, new, stream)
    # at::native::resize_bytes_cuda allocates the new block before it frees the old one, so both may be a peak
    moved = allocator.allocate(RESIZED, new, stream)
    if moved:
        allocator.release(storage, number)
        allocator.live[storage] = allocator.live.pop(RESIZED)
    return moved
