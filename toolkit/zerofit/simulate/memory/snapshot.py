"""Write a rank's allocations as torch.cuda.memory._dump_snapshot() does, for its viewers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from zerofit.simulate.memory.alloc_conf import AllocatorSettings
from zerofit.simulate.memory.allocator import RESIZED, Event, replay
from zerofit.simulate.memory.caching import Block, CachingAllocator, ExpandableAllocator, Pool
from zerofit.spec.memory_kinds import KIND_FILE

BASE_ADDRESS = 0x7F00_0000_0000  # where a process's device memory usually begins
# frames of the simulator between an op and its caller, which a real run does not have
_BETWEEN = ("zerofit/simulate/", "torch/utils/_python_dispatch", "torch/_subclasses/", "torch/overrides", "torch/_ops")


class StackFrame(NamedTuple):
    """One call in a stack."""

    file: str
    line: int
    name: str


Stack = tuple[StackFrame, ...]  # innermost call first


class AllocationOrigin(NamedTuple):
    """Where a storage was allocated, and its kind."""

    kind: str
    phase: str
    step: int
    module: str
    op: str
    stack: Stack


class StackLog:
    """The Python stacks of allocations. Equal stacks share one object to save memory."""

    def __init__(self) -> None:
        self._known: dict[Stack, Stack] = {}
        self._skipped: dict[CodeType, bool] = {}

    def here(self, code: CodeType | None, line: int) -> Stack:
        """Return the stack of the running op.

        If `code` is given, the stack begins at its line `line`. In backward, `line` is the line of the forward op.
        A real GPU's snapshot does not have that line.
        """
        found = [StackFrame(code.co_filename, line, code.co_name)] if code is not None else []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            own = frame.f_code
            skipped = self._skipped.get(own)
            if skipped is None:
                skipped = self._skipped[own] = any(part in own.co_filename for part in _BETWEEN)
            if not skipped and (own is not code or frame.f_lineno != line):
                found.append(StackFrame(own.co_filename, frame.f_lineno, own.co_name))
            frame = frame.f_back
        stack = tuple(found)
        return self._known.setdefault(stack, stack)


# torch's snapshot has two parts, which the viewers draw: a trace of what the allocator did, and the segments with their
# blocks at the end. Both come from the replay, whose steps correspond to torch's entries:
#
#   storage   alloc ................ free_requested          (RESIZED until the storage has its new block)
#   block     `- the same address ......... free_completed   (later, if another stream still uses it)
#   driver    segment_alloc ........................ segment_free    with expandable segments segment_map, segment_unmap
class _RecordingAllocator(CachingAllocator):
    def __init__(
        self, device_bytes: int | None, settings: AllocatorSettings, origins: Sequence[AllocationOrigin]
    ) -> None:
        super().__init__(device_bytes, settings)
        self.trace: list[dict[str, object]] = []
        self.requested: dict[Block, tuple[int, int]] = {}  # a block in use -> storage, requested bytes
        self._origins = origins
        self._frames: dict[AllocationOrigin, list[dict[str, object]]] = {}
        self._resized: tuple[dict[str, object], Block] | None = None  # the new block of a storage that is resized

    def allocate(self, storage: int, size_bytes: int, stream: int = 0) -> bool:
        done = super().allocate(storage, size_bytes, stream)
        if not done:
            free = max(0, int(self.device_bytes) - self.reserved_bytes)
            self._note("oom", 0, size_bytes, stream, self.frames_of(storage), device_free=free)
        elif size_bytes:
            block = self.live[storage]
            self.requested[block] = storage, size_bytes
            self._note("alloc", block.address, size_bytes, stream, self.frames_of(storage))
            self._resized = (self.trace[-1], block) if storage == RESIZED else None
        return done

    def release(self, storage: int, moment: int = 0) -> None:
        if self._resized is not None:  # the new block is this storage's
            event, new = self._resized
            event["frames"], self._resized = self.frames_of(storage), None
            self.requested[new] = storage, self.requested[new][1]
        block = self.live.get(storage)
        if block is not None:
            self._note("free_requested", block.address, self.requested[block][1], block.pool.stream)
        super().release(storage, moment)

    def frames_of(self, storage: int) -> list[dict[str, object]]:
        """Return a storage's frames, innermost first: kind, Python calls, module, phase, op."""
        if storage == RESIZED:
            return []
        origin = self._origins[storage]
        if origin not in self._frames:
            about = [f"module {origin.module}"] if origin.module else []
            about += [f"{origin.phase} of step {origin.step + 1}" if origin.step >= 0 else origin.phase, origin.op]
            frames = [StackFrame(KIND_FILE, 0, origin.kind), *origin.stack]
            frames += [StackFrame("zerofit", 0, text) for text in about]
            self._frames[origin] = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
        return self._frames[origin]

    def _free(self, block: Block) -> None:
        self._note("free_completed", block.address, self.requested.pop(block)[1], block.pool.stream)
        super()._free(block)

    def _give_back(self, block: Block) -> None:
        self._note("segment_free", block.address, block.size, block.pool.stream)
        super()._give_back(block)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        before = self.reserved_bytes
        block = super()._grow(pool, size)
        if block is not None and not isinstance(self, ExpandableAllocator):
            self._note("segment_alloc", block.address, self.reserved_bytes - before, pool.stream)
        return block

    def _note(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        frames: list[dict[str, object]] | None = None,
        **more: int,
    ) -> None:
        place = {} if action == "oom" else {"addr": BASE_ADDRESS + address}
        times = {"time_us": len(self.trace), "pool_id": (0, 0)}
        self.trace.append(
            {"action": action, **place, "size": size, "stream": stream, "frames": frames or [], **times, **more}
        )

    def segments(self) -> list[dict[str, object]]:
        waiting = {block for _, block in self._waiting}
        free = (block for pool in self._pools.values() for block in pool.largest_first())
        groups: list[list[Block]] = []
        for block in sorted({*self.live.values(), *waiting, *free}, key=lambda block: block.address):
            if block.prev is None or not block.prev.mapped:
                groups.append([])
            groups[-1].append(block)
        return [self._segment(blocks, waiting) for blocks in groups]

    def _segment(self, blocks: Sequence[Block], waiting: set[Block]) -> dict[str, object]:
        rows: list[dict[str, object]] = []
        used = active = 0
        for block in blocks:
            storage, requested = self.requested.get(block, (RESIZED, 0))
            state = "inactive" if block.free else "active_awaiting_free" if block in waiting else "active_allocated"
            active += 0 if block.free else block.size
            used += block.size if state == "active_allocated" else 0
            sizes = {"address": BASE_ADDRESS + block.address, "size": block.size, "requested_size": requested}
            rows.append({**sizes, "state": state, "frames": self.frames_of(storage)})
        pool = blocks[0].pool
        return {
            "device": 0,
            "address": BASE_ADDRESS + blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": used,
            "active_size": active,
            "stream": pool.stream,
            "segment_type": "small" if pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": isinstance(self, ExpandableAllocator),
            "frames": [],
            "blocks": rows,
        }


class _RecordingExpandable(_RecordingAllocator, ExpandableAllocator):
    def _map(self, block: Block, size: int) -> bool:
        address, before = block.address, self.reserved_bytes
        done = super()._map(block, size)
        if done:
            self._note("segment_map", address, self.reserved_bytes - before, block.pool.stream)
        return done

    def _unmap(self, block: Block) -> None:
        page, before = block.pool.page_bytes, self.reserved_bytes
        begin = -(-block.address // page) * page
        super()._unmap(block)
        if before > self.reserved_bytes:
            self._note("segment_unmap", begin, before - self.reserved_bytes, block.pool.stream)


def snapshot_of(
    events: Sequence[Event],
    origins: Sequence[AllocationOrigin],
    *,
    device_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
) -> dict[str, object]:
    """Return a rank's snapshot: its trace, and its segments at the end of the trace.

    The trace ends at an out-of-memory error, if there is one. `device_bytes`: memory of the device for torch's
    allocator; None: no limit.
    """
    settings = settings or AllocatorSettings()
    recording = _RecordingExpandable if settings.expandable_segments else _RecordingAllocator
    allocator = recording(device_bytes, settings, origins)
    replay(events, allocator=allocator, settings=settings, host_ahead=False)
    return {
        "segments": allocator.segments(),
        "device_traces": [allocator.trace],
        "allocator_settings": {"expandable_segments": settings.expandable_segments},
        "external_annotations": [],
    }
