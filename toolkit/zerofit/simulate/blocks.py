"""Blocks of device memory and the pools of free ones, as in torch's c10/cuda/CUDACachingAllocator.cpp.

A segment is what one cudaMalloc gives. It is cut into blocks that know their neighbours; free ones lie in the pool of
their stream and size class.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """A stretch of one segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size = pool, address, size  # both in bytes
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = True
        self.mapped = mapped  # False: address space without memory, in expandable segments only

    @property
    def key(self) -> int:
        """Orders by size, then by address (BlockComparatorSize)."""
        return self.size << 64 | self.address

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the block of the rest."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_neighbours(self) -> None:
        """Take in free neighbours of the same segment, out of their pool (try_merge_blocks)."""
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
    """The free blocks of one stream and one size class. `stream` and `small` say which."""

    def __init__(self, *, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address

    def add(self, block: Block) -> None:
        """Put a free block in."""
        if block.mapped:
            insort(self._keys, block.key)
            self._blocks[block.key] = block
        else:
            insort(self.unmapped, block, key=lambda b: b.address)

    def remove(self, block: Block) -> None:
        """Take this block out."""
        if block.mapped:
            del self._keys[bisect_left(self._keys, block.key)]
            del self._blocks[block.key]
        else:
            self.unmapped.remove(block)

    def take_best_fit(self, size: int) -> Block | None:
        """Take out the smallest block of at least `size` bytes, at the lowest address; None where there is none."""
        at = bisect_left(self._keys, size << 64)
        return self._blocks.pop(self._keys.pop(at)) if at < len(self._keys) else None

    def at_least(self, size: int) -> Iterator[Block]:
        """Free blocks of at least `size` bytes, smallest first."""
        for at in range(bisect_left(self._keys, size << 64), len(self._keys)):
            yield self._blocks[self._keys[at]]
