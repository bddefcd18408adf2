"""Read and write numbers without the page cache. Copy and compare them in one thread."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofit.checkpoint.direct_file import BLOCK, BUFFERS, DirectFile

SERIAL = 1 << 15  # elements: for more, torch uses all its threads, which wait for one another on a busy machine


class NumbersFile(DirectFile):
    """An open file of numbers."""

    def read(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return (count,) numbers from byte `place` on. The limits of `read_bytes` apply."""
        part = self.read_bytes(place, count * dtype.itemsize)
        count = len(part) // dtype.itemsize
        return torch.frombuffer(part, dtype=dtype, count=count) if count else torch.empty(0)

    def read_cached(self, place: int, out: Tensor) -> bool:
        """Read flat numbers into `out`. Return False if some are not in the page cache."""
        part = out.view(torch.uint8).numpy().data
        return self._read_cached(part, place) == len(part)

    def write(self, place: int, numbers: Tensor) -> list[tuple[int, bytes]]:
        """Write numbers that are in a `buffer`. Return the result of `write_bytes`."""
        return self.write_bytes(place, numbers.view(torch.uint8).numpy().data)


def buffer(place: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return (count,) numbers in the thread's memory, aligned for a write to byte `place`."""
    return torch.frombuffer(BUFFERS.written, dtype=dtype, count=count, offset=place % BLOCK)


def copy(out: Tensor, numbers: Tensor) -> None:
    """Copy flat numbers into `out`, which may have another type, in this thread."""
    for mine, theirs in zip(out.split(SERIAL), numbers.split(SERIAL), strict=True):
        mine.copy_(theirs)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether flat numbers of the same type are equal, computed in this thread."""
    return all(torch.equal(x, y) for x, y in zip(a.split(SERIAL), b.split(SERIAL), strict=True))


# bfloat16 stands for another type of 8 bits, since torch promotes none of those.
def wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the narrowest type that has all numbers of both types."""
    if a == b:
        return a
    return torch.promote_types(*(torch.bfloat16 if t.is_floating_point and t.itemsize == 1 else t for t in (a, b)))
