"""Read and write the numbers of large files past the page cache.

A checkpoint may be larger than the memory. Each of its pages in the cache costs CPU time and displaces another page.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

BLOCK = max(4096, mmap.PAGESIZE)  # bytes: O_DIRECT needs multiples of it as addresses, places and sizes
PIECE = 1 << 22  # bytes of one read or write
SERIAL = 1 << 15  # elements: torch uses all its threads for more, which wait for one another on a busy machine


class _Buffers(threading.local):
    """Aligned memory of a thread, which is used again: the first use of a page costs as much time as a read."""

    def __init__(self):
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default processes that are forked would share the memory
        self.read, self.written = (mmap.mmap(-1, PIECE + 2 * BLOCK, flags=own) for _ in range(2))


_BUFFERS = _Buffers()


class NumbersFile:
    """An open file. Without support for O_DIRECT in the file system, all data passes through the page cache."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY):
        self._cached = self._direct = os.open(path, flags)
        self._open = {self._cached}
        with suppress(OSError, AttributeError):
            self._direct = os.open(path, flags | os.O_DIRECT)
            self._open.add(self._direct)

    def __enter__(self) -> NumbersFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def read(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return (count,) numbers from byte `place`, at most PIECE bytes; the thread's next call overwrites them.

        Bytes in the page cache are taken from it. There are fewer numbers at the end of the file.
        """
        skip = place % BLOCK
        size = skip + count * dtype.itemsize
        buffer = memoryview(_BUFFERS.read)[: -(-size // BLOCK) * BLOCK]
        done = self._read_cached(buffer, place - skip)
        while done < size:
            first = done - done % BLOCK
            rest, start = [buffer[first:]], place - skip + first
            end = first + self._directly(lambda file, rest=rest, start=start: os.preadv(file, rest, start))
            if end <= done:  # the file has ended
                break
            done = end
        count = min(count, max(done - skip, 0) // dtype.itemsize)
        return torch.frombuffer(_BUFFERS.read, dtype=dtype, count=count, offset=skip) if count else torch.empty(0)

    def _read_cached(self, buffer: memoryview, place: int) -> int:
        try:
            return os.preadv(self._cached, [buffer], place, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # nothing is in the cache, or the system does not support the flag
            return 0

    def _directly(self, call: Callable[[int], int]) -> int:
        """Return the bytes that `call` reads or writes; a file system may refuse at the first call."""
        descriptor = self._direct  # another thread may change it
        try:
            return call(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor == self._cached:
                raise
            self._direct = self._cached
            return call(self._cached)

    def write(self, place: int, numbers: Tensor) -> list[tuple[int, bytes]]:
        """Write the full blocks of numbers in a `buffer`. Return the first and the last bytes, for `write_edges`.

        The kernel does not allow cached and direct writes to neighbouring blocks at the same time.
        """
        data, first = numbers.view(torch.uint8).numpy().data, -place % BLOCK
        end = max(first + (len(data) - first) // BLOCK * BLOCK, first)
        done = first
        while done < end:
            done += self._directly(lambda file, done=done: os.pwrite(file, data[done:end], place + done))
        edges = ((place, data[:first]), (place + end, data[end:]))
        return [(start, bytes(part)) for start, part in edges if part]

    def write_edges(self, edges: list[tuple[int, bytes]]) -> None:
        """Write the bytes that `write` has returned."""
        for place, part in edges:
            os.pwrite(self._cached, part, place)


def buffer(place: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the thread's memory for (count,) numbers that `NumbersFile.write` writes to byte `place`."""
    return torch.frombuffer(_BUFFERS.written, dtype=dtype, count=count, offset=place % BLOCK)


def copy(out: Tensor, numbers: Tensor) -> None:
    """Copy flat numbers into `out`, which may have another type, in this thread."""
    for mine, theirs in zip(out.split(SERIAL), numbers.split(SERIAL), strict=True):
        mine.copy_(theirs)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether flat numbers of the same type are equal, computed in this thread."""
    return all(torch.equal(x, y) for x, y in zip(a.split(SERIAL), b.split(SERIAL), strict=True))
