"""Read and write files without the page cache.

A checkpoint may be larger than the memory. Each of its pages in the cache costs CPU time and displaces another
page.

Importing this module imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import io
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

BLOCK = max(4096, mmap.PAGESIZE)  # bytes: O_DIRECT needs multiples of it as addresses, places and sizes
PIECE = 1 << 22  # bytes of one read or write
CACHESTAT = 451  # the number of the system call
FEW_BYTES = 1 << 15  # fewer are read through the cache: as headers, they share their blocks with other reads


# Memory is reused, because the first use of a page takes as long as a read.
class _Buffers(threading.local):
    """Aligned memory of a thread."""

    def __init__(self):
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default processes that are forked would share the memory
        self.read, self.written = (mmap.mmap(-1, PIECE + 2 * BLOCK, flags=own) for _ in range(2))


BUFFERS = _Buffers()


class DirectFile:
    """An open file. Data passes through the page cache if the system requires it."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY):
        self._cached = self._direct = os.open(path, flags)
        self._open = {self._cached}
        with suppress(OSError, AttributeError):
            self._direct = os.open(path, flags | os.O_DIRECT)
            self._open.add(self._direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        while self._open:
            os.close(self._open.pop())

    def read_bytes(self, place: int, size: int) -> memoryview:
        """Return `size` bytes from `place` on, but at most PIECE.

        The thread's next call overwrites them. Bytes that are in the page cache are copied from there. At the end of
        the file, fewer bytes are returned.
        """
        skip = place % BLOCK
        end = skip + min(size, PIECE)
        buffer = memoryview(BUFFERS.read)[: -(-end // BLOCK) * BLOCK]
        done = self._read_cached(buffer, place - skip)
        while done < end:
            # A direct read may end within a block. The next one repeats this block, since its place must be a multiple
            # of BLOCK.
            first = done - done % BLOCK
            rest, start = [buffer[first:]], place - skip + first
            got = first + self._directly(lambda file, rest=rest, start=start: os.preadv(file, rest, start))
            if got <= done:  # the file has ended
                break
            done = got
        return buffer[skip : max(min(done, end), skip)]

    def _read_cached(self, buffer: memoryview, place: int) -> int:
        """Read from the page cache. Return 0 if it lacks a page."""
        try:
            size = min(len(buffer), os.fstat(self._cached).st_size - place)
            # a read of a missing page would make the kernel read ahead
            if pages_in_cache(self._cached, place, size) * mmap.PAGESIZE < size:
                return 0
            return os.preadv(self._cached, [buffer], place, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # nothing is in the cache, or the system does not support the flag
            return 0

    def _directly(self, call: Callable[[int], int]) -> int:
        """Return the bytes that `call` moves, with the page cache if the system requires it."""
        descriptor = self._direct  # another thread may change it
        try:
            return call(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor == self._cached:
                raise
            self._direct = self._cached
            return call(self._cached)

    def allocate(self) -> None:
        """Allocate the file's disk space, if the system can."""
        # without allocated space, threads that write wait for one another
        # os.posix_fallocate does not fail on file systems without this call: glibc then writes to every block.
        call = getattr(ctypes.CDLL(None), "fallocate", None)
        if call:
            call(self._cached, 0, ctypes.c_longlong(0), ctypes.c_longlong(os.fstat(self._cached).st_size))

    def write_bytes(self, place: int, data: memoryview) -> list[tuple[int, bytes]]:
        """Write the full blocks of `data`. Return the bytes around them, for `write_edges`."""
        # The kernel does not allow cached and direct writes to neighboring blocks at the same time, so the edges wait.
        first = -place % BLOCK
        end = max(first + (len(data) - first) // BLOCK * BLOCK, first)
        done = first
        while done < end:
            done += self._directly(lambda file, done=done: os.pwrite(file, data[done:end], place + done))
        edges = ((place, data[:first]), (place + end, data[end:]))
        return [(start, bytes(part)) for start, part in edges if part]

    def write_edges(self, edges: list[tuple[int, bytes]]) -> None:
        """Write the bytes that `write_bytes` returned."""
        for place, part in edges:
            os.pwrite(self._cached, part, place)


def pages_in_cache(file: int, place: int, size: int) -> float:
    """Return how many pages of a part are in the page cache; infinity before Linux 6.5."""
    span, counts = (ctypes.c_uint64 * 2)(place, max(size, 0)), (ctypes.c_uint64 * 5)()
    call = getattr(ctypes.CDLL(None), "syscall", None)
    known = sys.platform == "linux" and call and call(ctypes.c_long(CACHESTAT), file, span, counts, 0) == 0
    return counts[0] if known else math.inf


class UncachedReader(io.RawIOBase):
    """A file, or a part of it, for `zipfile`. Large reads bypass the page cache."""

    def __init__(self, path: Path | str, first: int = 0, length: int | None = None):
        self._file, self._first, self._place = DirectFile(path), first, 0
        self._length = os.stat(path).st_size - first if length is None else length
        with suppress(OSError, AttributeError):  # small reads do not read ahead
            os.posix_fadvise(self._file._cached, 0, 0, os.POSIX_FADV_RANDOM)

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: the position can be changed."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the part, and return the position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as a file does, which zipfile expects
        self._place = start + offset
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] # any buffer
        """Read into a buffer. Return the number of bytes; 0 at the end."""
        out, count = memoryview(buffer)[: max(self._length - self._place, 0)], 0
        if len(out) < FEW_BYTES:
            count = os.preadv(self._file._cached, [out], self._first + self._place)
        else:  # zipfile takes fewer bytes for the end of the file
            while part := self._file.read_bytes(self._first + self._place + count, len(out) - count):
                out[count : count + len(part)] = part
                count += len(part)
        self._place += count
        return count
