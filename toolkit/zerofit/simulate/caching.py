"""torch's caching allocator for CUDA devices, without a device: which segments it takes and how it cuts them.

A model of c10/cuda/CUDACachingAllocator.cpp (native backend, default settings; constants and rules by their names
there, read in sources from torch 2.2 on, the constants in 2.14.1). Of two free blocks of one size the allocator takes
the one at the lower address; which one that is, the driver decides: here later segments lie higher. Not modelled:
memory that waits for an event because another stream used it (`record_stream`), CUDA graphs' pools.
"""

from __future__ import annotations

from math import inf

from zerofit.simulate.blocks import Block, Pool

MIB = 2**20
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes are multiples of it
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer, large_segment_size
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on, a request has a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge


def rounded_bytes(size_bytes: int) -> int:
    """What a request takes of its pool (round_size)."""
    return max(MIN_BLOCK_BYTES, -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_bytes(size_bytes: int) -> int:
    """What is asked of the driver for a rounded request that no cached block can hold (get_allocation_size)."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class CachingAllocator:
    """The allocator of one device that has `device_bytes` for it (None: no limit)."""

    def __init__(self, device_bytes: int | None = None) -> None:
        self.device_bytes = inf if device_bytes is None else device_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.flushes = 0
        self.live: dict[int, Block] = {}
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def allocate(self, storage: int, size_bytes: int, stream: int = 0) -> bool:
        """Allocate for a storage; False where the device has no room. As in torch, no bytes take no block."""
        if not size_bytes:
            return True
        size = rounded_bytes(size_bytes)
        pool = self._pool(size, stream)
        block = self._take_cached(pool, size)
        if block is None:
            block = self._grow(pool, size) or self._flush_and_grow(pool, size)
            if block is None:
                return False
        if self._splits(pool, block.size - size):
            pool.add(block.cut(size))
        block.free = False
        self.live[storage] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return True

    def release(self, storage: int) -> None:
        """Put a storage's block back into its pool, merged with free neighbours (free_block)."""
        block = self.live.pop(storage, None)
        if block is not None:
            self.allocated_bytes -= block.size
            block.free = True
            block.absorb_neighbours()
            block.pool.add(block)

    def empty_cache(self) -> None:
        """Give segments without a live block back to the driver (release_cached_blocks)."""
        for pool in self._pools.values():
            for block in list(pool.at_least(0)):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _pool(self, size: int, stream: int) -> Pool:
        small = size <= SMALL_BYTES  # get_pool
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream=stream, small=small)
        return pool

    def _take_cached(self, pool: Pool, size: int) -> Block | None:
        return pool.take_best_fit(size)

    def _splits(self, pool: Pool, rest: int) -> bool:
        """Whether what a block has too much becomes a block of its own (should_split)."""
        return rest >= MIN_BLOCK_BYTES if pool.small else rest > SMALL_BYTES

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment (alloc_block); None where the device has no room for it."""
        new_bytes = segment_bytes(size)
        if self.reserved_bytes + new_bytes > self.device_bytes:
            return None
        self._reserve(new_bytes)
        block = Block(pool, self._next_address, new_bytes)
        self._next_address += new_bytes
        return block

    def _flush_and_grow(self, pool: Pool, size: int) -> Block | None:
        self.flushes += 1
        self.empty_cache()
        return self._grow(pool, size)

    def _reserve(self, new_bytes: int) -> None:
        self.reserved_bytes += new_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
