"""Model torch's caching allocator under `expandable_segments:True` ("Note [Expandable Segments]" of its source)."""

from __future__ import annotations

from math import isinf

from zerofit.simulate.memory.alloc_conf import MIN_BLOCK_BYTES
from zerofit.simulate.memory.caching import Block, CachingAllocator, Pool
from zerofit.spec.overhead import LARGE_SEGMENT_BYTES

UNLIMITED_SPACE_BYTES = 2**48  # address space of an expandable segment without a limit


class ExpandableAllocator(CachingAllocator):
    """The allocator under `expandable_segments:True`: one segment per pool, which grows page by page.

    A segment is address space for 1 1/8 of the device. Memory is mapped into it in pages of 2 MiB (small pool) or 20
    MiB (large pool).
    """

    def empty_cache(self) -> None:
        """Unmap every page that is completely inside a free block (unmap_block)."""
        self._free_waiting()
        for pool in self._pools.values():
            for block in list(pool.at_least(pool.page_bytes)):
                self._unmap(block)

    def _take_cached(self, pool: Pool, size: int) -> Block | None:
        """Remove the best fit; a block counts with the unmapped space after it (get_free_block)."""
        best = None
        for block in pool.at_least(size):
            if best is not None and _room(block) >= _room(best):
                break
            best = block
        if best is not None:
            pool.remove(best)
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
        """Return the first free or unmapped neighbours with enough room (find_expandable_block), else a new segment."""
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
        """Map memory to the beginning of an unmapped block (map_block); return False if the device has none left."""
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
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
