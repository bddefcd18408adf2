"""Read the blocks and the trace of a memory snapshot, as torch 1.13 and later write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_pickle import read_pickle

Frames = Sequence[Mapping[str, object]]  # innermost first: "filename", "name", "line"
ALIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
SWING = 0.3  # share of the range of allocated bytes between a step's highest and lowest moment


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """An allocation that is alive at a moment."""

    bytes: int
    frames: Frames
    event: int  # index of the event in the trace that allocated it; -1 if the trace has no such event


@dataclass(frozen=True, slots=True)
class AllocatorCall:
    """One event of the trace."""

    action: str
    address: int
    bytes: int
    frames: Frames
    free_bytes: int  # free memory of the device; only for "oom"


@dataclass(frozen=True)
class MemorySnapshot:
    """One device's memory."""

    blocks: dict[int, AliveBlock]  # by address, at the end
    trace: tuple[AllocatorCall, ...]
    reserved_bytes: int  # at the end
    private_bytes: int  # bytes of segments in private pools
    alloc_conf: dict[str, object]  # the allocator's settings; {} before torch 2.1

    @cached_property
    def moment(self) -> int:
        """The event to explain: the last out-of-memory event, or else the peak."""
        failed = [number for number, event in enumerate(self.trace) if event.action == "oom"]
        if failed:
            return failed[-1]
        curve = self.allocated
        return max(range(len(curve)), key=curve.__getitem__, default=-1)

    @property
    def ran_out(self) -> AllocatorCall | None:
        """The out-of-memory event at `moment`."""
        event = self.trace[self.moment] if self.trace else None
        return event if event and event.action == "oom" else None

    @cached_property
    def allocated(self) -> list[int]:
        """Allocated bytes after each event."""
        live, found = 0, list[int]()
        for event in self.trace:
            live += event.bytes * _SIGN.get(event.action, 0)
            found.append(live)
        # allocated before the trace began
        # The trace shows only changes. The blocks at the end give the absolute size, and thus the size before the
        # trace.
        before = sum(block.bytes for block in self.blocks.values()) - live
        return [before + size for size in found]

    @property
    def reserved_at_moment(self) -> int:
        """Reserved bytes at `moment`."""
        later = self.trace[self.moment + 1 :]  # of these segments, the bytes at the end have too many or lack some
        return self.reserved_bytes - sum(event.bytes * _SEGMENT_SIGN.get(event.action, 0) for event in later)

    def alive(self) -> list[AliveBlock]:
        """Return the blocks that were alive at `moment`, also those that were freed later."""
        if not self.trace:
            return list(self.blocks.values())
        live: dict[int, AliveBlock] = {}
        seen: set[int] = set()  # addresses that the trace allocates up to the moment
        for number, event in enumerate(self.trace[: self.moment + 1]):
            if event.action == "alloc":
                live[event.address] = AliveBlock(event.bytes, event.frames, number)
            elif event.action == "free_completed":
                live.pop(event.address, None)
            else:
                continue
            seen.add(event.address)
        # blocks from before the trace: still there at the end, or first freed after the moment
        # A block that the trace only frees was allocated earlier, so its stack is unknown.
        found = list(live.values())
        for event in self.trace[self.moment + 1 :]:
            if event.action == "free_completed" and event.address not in seen:
                found.append(AliveBlock(event.bytes, (), -1))
            if event.action in ("free_completed", "alloc"):
                seen.add(event.address)
        return found + [block for address, block in self.blocks.items() if address not in seen]

    @cached_property
    def steps(self) -> list[int]:
        """The events up to `moment` at which allocated memory was at a low point between two steps."""
        # a low point counts if memory falls to it and rises from it by `SWING` of the curve's range
        curve = self.allocated[: self.moment + 1]
        if not curve:
            return []
        swing = SWING * (max(curve) - min(curve))
        found, high, low, at, falling = list[int](), curve[0], curve[0], 0, False
        for number, size in enumerate(curve):
            if falling:
                if size < low:
                    low, at = size, number
                elif size > low + swing:
                    found.append(at)
                    high, falling = size, False
            elif size > high:
                high = size
            elif size < high - swing:
                low, at, falling = size, number, True
        return found


_SIGN = {"alloc": 1, "free_completed": -1}
_SEGMENT_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a snapshot: the device that ran out of memory, or else the fullest device.

    Raises OSError or Unreadable.
    """
    content = read_pickle(path)
    try:
        devices = _devices(content)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"it is not a memory snapshot: {type(error).__name__} {error}") from None
    if not devices:
        raise Unreadable("it records the memory of no device")
    return max(devices, key=lambda device: (device.ran_out is not None, device.reserved_bytes))


def _devices(content: object) -> list[MemorySnapshot]:
    if isinstance(content, list):  # torch.cuda.memory_snapshot(), and torch before 2.0
        content = {"segments": content}
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise Unreadable("it is not a memory snapshot: it has no segments")
    traces = content.get("device_traces") or []
    settings = content.get("allocator_settings")
    numbers = {int(segment.get("device", 0)) for segment in content["segments"]}
    numbers |= {number for number, events in enumerate(traces) if events}
    found = []
    for number in sorted(numbers):
        segments = [segment for segment in content["segments"] if int(segment.get("device", 0)) == number]
        trace = tuple(map(_event, traces[number] if 0 <= number < len(traces) else ()))
        allocated = {event.address: n for n, event in enumerate(trace) if event.action == "alloc"}
        private = (segment for segment in segments if any(segment.get("segment_pool_id", ())))
        found.append(
            MemorySnapshot(
                blocks=_blocks_in_use(allocated, segments),
                trace=trace,
                reserved_bytes=sum(int(segment["total_size"]) for segment in segments),
                private_bytes=sum(int(segment["total_size"]) for segment in private),
                alloc_conf=settings if isinstance(settings, dict) else {},
            )
        )
    return found


def _event(event: dict[str, Any]) -> AllocatorCall:
    address = event.get("addr", event.get("address", -1))
    free = event.get("device_free", 0) or 0
    return AllocatorCall(str(event["action"]), int(address), int(event.get("size", 0)), _frames(event), int(free))


def _blocks_in_use(allocated: dict[int, int], segments: Sequence[dict[str, Any]]) -> dict[int, AliveBlock]:
    """Return the blocks in use by address. `allocated`: the event that allocated an address."""
    found: dict[int, AliveBlock] = {}
    for segment in segments:
        address = int(segment.get("address") or 0)
        for block in segment["blocks"]:
            # in older formats, addresses follow from the sizes of earlier blocks
            address = int(block.get("address", address))
            if block["state"] in ALIVE:
                history = block.get("history") or [{}]  # torch 2.0 and before
                frames = _frames(block) or _frames(history[0])
                size = int(block.get("requested_size") or history[0].get("real_size") or block["size"])
                found[address] = AliveBlock(size, frames, allocated.get(address, -1))
            address += int(block["size"])
    return found


def _frames(event: dict[str, object]) -> Frames:
    frames = event.get("frames")
    return frames if isinstance(frames, list | tuple) else ()
