"""Read pickles of other programs without running code."""

from __future__ import annotations

import gzip
import pickle
import resource
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from zerofit.spec.foreign import Unreadable
from zerofit.spec.process import collector_off

# Pickles begin with the opcode PROTO from protocol 2 on. Older ones have no mark, so they are not recognized.
GZIP, PICKLE = b"\x1f\x8b", b"\x80"
GROWTH = 24  # bytes of Python's objects per byte of a pickle: one byte can be an empty dictionary, most are less
SPARE_BYTES = 2 << 30


class PlainUnpickler(pickle.Unpickler):
    """Refuses every class, function and persistent object, so a pickle cannot call anything.

    A subclass may return harmless classes from `find_class`.
    """

    def find_class(self, module: str, name: str) -> object:
        """Refuse a class or function."""
        raise pickle.UnpicklingError(f"it has an object of {module}.{name}, not only plain data")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse an object outside of the file."""
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle, compressed by gzip or not. Raises OSError."""
    try:
        with _opened(path) as file:
            return file.read(1) == PICKLE
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return False


def read_pickle(path: Path, unpickler: type[PlainUnpickler] = PlainUnpickler) -> Any:
    """Return the content of a pickle, compressed by gzip or not. Raises OSError or Unreadable."""
    with _opened(path) as file, _limited_memory(path.stat().st_size):
        try:
            return unpickler(file).load()
        except OSError as error:
            if error.errno is not None:  # an error of the disk; gzip's errors have no errno
                raise
            raise Unreadable(str(error)) from None
        except MemoryError:
            raise Unreadable("reading it needs far more memory than the size of the file") from None
        except Exception as error:  # pickle raises many kinds of errors for bytes that are not a pickle
            raise Unreadable(f"it is not a pickle of plain data: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if it is compressed by gzip."""
    with path.open("rb") as file:
        compressed = file.read(2) == GZIP
        file.seek(0)
        if not compressed:
            yield file
            return
        with gzip.open(file) as inner:
            yield cast(BinaryIO, inner)


@contextmanager
def _limited_memory(size: int) -> Iterator[None]:
    """Limit this process's address space while it reads a file of `size` bytes."""
    # a few bytes of a pickle can request a table of many GiB
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    most = used + SPARE_BYTES + GROWTH * size
    limits = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        with collector_off():  # garbage collection would scan millions of new objects again and again
            yield
    finally:
        if used:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
