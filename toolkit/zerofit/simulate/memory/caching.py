"""Model torch's caching allocator for CUDA: how it allocates segments and splits them.

The model follows c10/cuda/CUDACachingAllocator.cpp: the native backend with the names and rules of torch 2.2 and
later, and the constants of 2.14.1. One cudaMalloc allocates a segment. A segment is split into blocks, which are
linked to their neighbors. Each pool has the free blocks of one stream and one size class. If another stream uses a
block (`record_stream`), the block is not released until the work on that stream is known to be done.

Of two free blocks of one size, the allocator uses the block at the lower address. On a GPU the driver chooses
addresses. In this model later segments have higher addresses. CUDA graphs' pools are not modeled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf, isinf

from zerofit.simulate.memory.alloc_conf import MIB, MIN_BLOCK_BYTES, AllocatorSettings
from zerofit.spec.overhead import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES

SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on, a request has a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge
UNLIMITED_SPACE_BYTES = 2**48  # address space of an expandable segment without a limit


def segment_bytes(size_bytes: int) -> int:
    """Return how many bytes the driver allocates for a rounded request (get_allocation_size).

    This happens if no cached block fits.
    """
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class Block:
    """A range of one segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size", "uses")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size = pool, address, size  # both in bytes
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = True
        self.mapped = mapped  # False: address space without memory, in expandable segments only
        self.uses: set[int] = set()  # streams other than the pool's that use it (stream_uses)

    # one number sorts faster than a pair: | size | 64 bits of address |
    @property
    def key(self) -> int:
        """The block's sort key: its size, then its address (BlockComparatorSize)."""
        return self.size << 64 | self.address

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes of the block. Return the rest as a new block."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_neighbours(self) -> None:
        """Merge with free neighbors in the segment. Remove them from their pool (try_merge_blocks)."""
        before, after = self.prev, self.next
        if before is not None and before.free and before.mapped == self.mapped:
            self.pool.remove(before)
            self.address = before.address
            self.size += before.size
            self.prev = before.prev
            if self.prev is not None:
                self.prev.next = self
        if after is not None and after.free and after.mapped == self.mapped:
            self.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if self.next is not None:
                self.next.prev = self


class Pool:
    """The free blocks of one stream and one size class."""

    def __init__(self, *, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES  # of expandable segments
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address

    def add(self, block: Block) -> None:
        """Add a free block."""
        if block.mapped:
            insort(self._keys, block.key)
            self._blocks[block.key] = block
        else:
            insort(self.unmapped, block, key=lambda b: b.address)

    def remove(self, block: Block) -> None:
        """Remove a block."""
        if block.mapped:
            del self._keys[bisect_left(self._keys, block.key)]
            del self._blocks[block.key]
        else:
            self.unmapped.remove(block)

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest block of at least `size` bytes; None if there is none.

        Of blocks of one size, return the one at the lowest address.
        """
        return next(self.at_least(size), None)

    def largest_first(self) -> list[Block]:
        """Return the free blocks, largest first."""
        return [self._blocks[key] for key in reversed(self._keys)]

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the free blocks of at least `size` bytes, smallest first."""
        for at in range(bisect_left(self._keys, size << 64), len(self._keys)):
            yield self._blocks[self._keys[at]]


# How a request is served, in torch's order (CUDACachingAllocator.cpp, malloc):
#   1. round the size, and choose the pool of its stream and size class (small: up to 1 MiB);
#   2. take the smallest free block that is large enough;
#   3. otherwise allocate a new segment from the driver, if the device has memory left;
#   4. otherwise return oversize blocks, then all unused segments, to the driver, and try 3 again;
#   5. split the block if the rest is large enough to be useful, and return the rest to the pool.
#
#   segment  |  used  | free |     used     |    free    |     neighbors are linked; two free ones merge
#            `- one cudaMalloc; reserved bytes count it until no block of it is used and it is returned
#
# So fragmentation depends on the order of requests, and only a replay of all of them gives the reserved peak.
class CachingAllocator:
    """The allocator of one device. `device_bytes`: memory of the device; None: no limit."""

    def __init__(self, device_bytes: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self.device_bytes = inf if device_bytes is None else device_bytes
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.flushes = 0
        self.live: dict[int, Block] = {}
        self._waiting: list[tuple[int, Block]] = []  # released while other streams still used them (cuda_events)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def allocate(self, storage: int, size_bytes: int, stream: int = 0) -> bool:
        """Allocate a storage. Return False if the device has too little memory.

        As in torch, a storage of 0 bytes needs no block.
        """
        if not size_bytes:
            return True
        size = self.settings.rounded_bytes(size_bytes)
        small = size <= SMALL_BYTES  # get_pool
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream=stream, small=small)
        block = self._take_cached(pool, size) or self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.flushes += 1
            self.empty_cache()
            block = self._grow(pool, size)
        if block is None:
            return False
        if self._splits(pool, size, block.size - size):
            pool.add(block.cut(size))
        block.free = False
        self.live[storage] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return True

    def record_stream(self, storage: int, stream: int) -> None:
        """Record that a stream uses a storage that was allocated on another stream (recordStream)."""
        block = self.live.get(storage)
        if block is not None and stream != block.pool.stream:
            block.uses.add(stream)

    def release(self, storage: int, moment: int = 0) -> None:
        """Return a storage's block to its pool, once no other stream uses the block (free)."""
        block = self.live.pop(storage, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        if block.uses:
            self._waiting.append((moment, block))
        else:
            self._free(block)

    def synchronized(self, stream: int | None, before: int) -> None:
        """Free blocks that were waiting for work on `stream` (None: all streams) (process_events).

        Only blocks released before the moment `before` are freed.
        """
        still = []
        for moment, block in self._waiting:
            if moment < before:
                block.uses = set() if stream is None else block.uses - {stream}
            if block.uses:
                still.append((moment, block))
            else:
                self._free(block)
        self._waiting = still

    def empty_cache(self) -> None:
        """Release segments without a live block to the driver (release_cached_blocks)."""
        self._free_waiting()
        for pool in self._pools.values():
            for block in list(pool.at_least(0)):
                if block.prev is None and block.next is None:
                    self._give_back(block)

    def _free_waiting(self) -> None:
        """Free all blocks that wait for a stream (synchronize_and_free_events)."""
        self.synchronized(None, 1 + max((moment for moment, _ in self._waiting), default=0))

    def _free(self, block: Block) -> None:
        """Return a block to its pool, merged with free neighbors (free_block)."""
        block.free = True
        block.absorb_neighbours()
        block.pool.add(block)

    def _give_back(self, block: Block) -> None:
        """Release a segment to the driver (release_block)."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    # With `max_split_size`, oversize blocks are never split, so a request can lack memory beside large free blocks.
    # torch first returns the smallest of them that is large enough, otherwise the largest ones one by one
    # (release_available_cached_blocks).
    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release oversize blocks to the driver. Return whether a request now fits."""
        limit = self.settings.max_split_bytes
        if isinf(limit):
            return False
        wanted = max(size, int(limit))
        fitting = pool.best_fit(wanted)
        if fitting is not None:
            self._give_back(fitting)
            return True
        released = 0
        for block in pool.largest_first():
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._give_back(block)
        return released >= wanted

    def _take_cached(self, pool: Pool, size: int) -> Block | None:
        """Remove the best-fitting block from its pool, and return it (get_free_block).

        Return None if there is none, or if it is too large for the request.
        """
        block, limit = self._best_fit(pool, size), self.settings.max_split_bytes
        if (
            block is None
            or (size < limit <= block.size)
            or (size >= limit and block.size >= size + self.settings.rounding_bytes)
        ):
            return None
        pool.remove(block)
        return block

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        return pool.best_fit(size)

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        """Return whether the rest of a block becomes a block of its own (should_split).

        `rest`: bytes of the block beyond the request.
        """
        if pool.small:
            return rest >= MIN_BLOCK_BYTES
        return size < self.settings.max_split_bytes and rest > SMALL_BYTES

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Allocate a new segment (alloc_block). Return None if the device has too little memory."""
        new_bytes = segment_bytes(size)
        if self.reserved_bytes + new_bytes > self.device_bytes:
            return None
        self._reserve(new_bytes)
        block = Block(pool, self._next_address, new_bytes)
        self._next_address += new_bytes
        return block

    def _reserve(self, new_bytes: int) -> None:
        self.reserved_bytes += new_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


# One long range of addresses per pool; memory is mapped into it page by page:
#
#   |  used  | free |  used  |   unmapped ...   |     a request grows the range at its end, or fills an unmapped hole
#
# Pages that lie completely inside a free block can be returned, so there is hardly any fragmentation.
class ExpandableAllocator(CachingAllocator):
    """The allocator with `expandable_segments:True`: a segment per pool grows page by page.

    A segment is address space for 1 1/8 of the device's memory. Memory is mapped into it in pages of 2 MiB (small
    pool) or 20 MiB (large pool).
    """

    def empty_cache(self) -> None:
        """Unmap every page that is completely inside a free block (unmap_block)."""
        self._free_waiting()
        for pool in self._pools.values():
            for block in list(pool.at_least(pool.page_bytes)):
                self._unmap(block)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Return the best-fitting block."""
        # Unmapped space after a block counts as part of it (get_free_block).
        best = None
        for block in pool.at_least(size):
            if best is not None and _room(block) >= _room(best):
                break
            best = block
        return best

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= MIN_BLOCK_BYTES

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        return False  # nothing is oversize: pages are unmapped one by one

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map memory at the lowest address where `size` bytes fit (try_allocate_expandable_block)."""
        block = self._find_space(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next  # unmapped; once mapped, it merges with this block
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _find_space(self, pool: Pool, size: int) -> Block:
        """Return the first of adjacent free or unmapped blocks that together have `size` bytes.

        If there are none, return a new segment (find_expandable_block).
        """
        for block in pool.unmapped:
            first = block.prev if block.prev is not None and block.prev.free else block
            room, at = 0, first
            while at is not None and at.free and room < size:
                room, at = room + at.size, at.next
            if room >= size:
                return first
        device = UNLIMITED_SPACE_BYTES if isinf(self.device_bytes) else int(self.device_bytes)
        pages = -(-(device + device // 8) // LARGE_SEGMENT_BYTES)  # a multiple of both page sizes
        block = Block(pool, self._next_address, pages * LARGE_SEGMENT_BYTES, mapped=False)
        self._next_address += block.size
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map memory to the beginning of an unmapped block (map_block).

        Return False if the device has too little memory.
        """
        page = block.pool.page_bytes
        mapped = -(-size // page) * page
        if self.reserved_bytes + mapped > self.device_bytes:
            return False
        self._reserve(mapped)
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.add(block.cut(mapped))
        block.mapped = True
        block.absorb_neighbours()
        block.pool.add(block)
        return True

    # Only complete pages can be unmapped. What is left of the block on both sides stays free:
    #
    #   page      |          |##########|##########|          |
    #   block         | free  . unmapped .          . free |
    def _unmap(self, block: Block) -> None:
        pool, page = block.pool, block.pool.page_bytes
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            middle = block.cut(begin - block.address)
            pool.add(block)
            block = middle
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        block.mapped = False
        block.absorb_neighbours()
        self.reserved_bytes -= end - begin
        if block.prev is not None or block.next is not None:  # otherwise the segment is empty
            pool.add(block)


def _room(block: Block) -> int:
    # what the block can grow to, as `expandable_size` in get_free_block
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
