"""Plain files, compressed or not; files in other programs' formats are refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from zerofit.data.base import NAMED
from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SKIPPED_BYTES = 1 << 20  # bytes to skip at a time
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
LARGEST_CELL = 1 << 24  # characters; Python's limit of 131,072 is less than a long text
# Excel and Windows' editors write it before the text, where `json` and `csv` would take it for a character
MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark
# Files named .txt or .jsonl can have any format, so the content decides: the first bytes of a file, its type, and how
# to read or convert it.
_OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "a Parquet file", "--data hf:{path} reads it"),
    (b"ARROW1", "an Arrow file", "--data hf:{path} reads it"),
    (b"\xff\xfe", "UTF-16", "iconv -f utf-16 -t utf-8 {path} > NEW converts it"),
    (b"\xfe\xff", "UTF-16", "iconv -f utf-16 -t utf-8 {path} > NEW converts it"),
    (b"PK\x03\x04", "a zip archive (or an office document)", "unzip {path}"),
    (b"7z\xbc\xaf", "a 7z archive", "7z x {path}"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "lz4 -d {path}"),
    (b"%PDF", "a PDF file", "pdftotext {path}"),
    (b"\x89PNG", "an image", "--data imagefolder:PATH reads folders of images"),
    (b"\xff\xd8\xff", "an image", "--data imagefolder:PATH reads folders of images"),
    (b"\x93NUMPY", "a NumPy array", "--data npy:{path} reads a table of numbers"),
)
_TAR = 257  # position of the magic of a tar archive


def open_plain(path: Path) -> IO[bytes]:
    """Open a file's content, decompressing gzip, bzip2, xz and zstd.

    The content of a compressed file cannot be seeked, only skipped (`skip`). Opening and reading raise UserError.
    """
    try:
        with path.open("rb") as file:
            # xz has the longest of these signatures.
            head = file.read(6)  # the content decides, since suffixes are often missing or wrong
        opener = next((opener for start, opener in _DECOMPRESSED.items() if head.startswith(start)), None)
        if opener is None:
            return path.open("rb")
        return io.BufferedReader(_Decompressed(path, opener(path)), SKIPPED_BYTES)
    except OSError as error:
        raise UserError(_unreadable(path, error)) from None


def _zstd(path: Path) -> io.BufferedIOBase:
    import pyarrow

    return cast(io.BufferedIOBase, pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_DECOMPRESSED: dict[bytes, Callable[[Path], io.BufferedIOBase]] = {  # by a file's first bytes
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstd,
}


# A damaged archive fails anywhere within reading, with errors that name neither the file nor the cause.
class _Decompressed(io.RawIOBase):
    """The content of a compressed file; errors name the file."""

    def __init__(self, path: Path, content: io.BufferedIOBase):
        self._path, self._content = path, content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        try:
            read = self._content.read(len(view))
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(_unreadable(self._path, error)) from None
        view[: len(read)] = read
        return len(read)

    def close(self) -> None:
        self._content.close()
        super().close()


def open_cells(path: Path) -> tuple[IO[str], str]:
    """Open a file for `csv`; return its text and the delimiter.

    The text is UTF-8, decompressed, without byte order mark. Raises UserError and UnicodeDecodeError.
    """
    csv.field_size_limit(LARGEST_CELL)
    # Without newline="", Python would change line breaks within quoted cells.
    return io.TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline=""), delimiter_of(path)


def delimiter_of(path: Path) -> str:
    """Return the delimiter of a CSV file's first line: comma, else semicolon, tab or bar."""
    with io.TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline="") as file:
        first = file.readline(SKIPPED_BYTES)
    # A comma decides even if another sign is more frequent. Without any sign, `max` returns the comma.
    return "," if "," in first else max(",;\t|", key=first.count)


def is_compressed(path: Path) -> bool:
    """Return whether `open_plain` decompresses a file."""
    with open_plain(path) as file:
        return not file.seekable()


def plain_size(path: Path) -> int:
    """Return the size of a file's decompressed content in bytes."""
    with open_plain(path) as file:
        if file.seekable():
            return path.stat().st_size
        return sum(len(read) for read in iter(lambda: file.read(SKIPPED_BYTES), b""))


def skip(file: IO[bytes], count: int) -> None:
    """Skip `count` bytes of an opened file."""
    if file.seekable():
        file.seek(count, io.SEEK_CUR)
        return
    while count > 0 and (read := file.read(min(count, SKIPPED_BYTES))):
        count -= len(read)


def refuse_others(files: Iterable[Path]) -> None:
    """Raise UserError if files are not text, with up to 20 files and how to read them."""
    problems: list[Problem] = []
    for path in files:
        with open_plain(path) as file:
            head = file.read(_TAR + 5)
        title, hint = next(((title, hint) for start, title, hint in _OTHERS if head.startswith(start)), ("", ""))
        if head[_TAR:] == b"ustar":
            title, hint = "a tar archive", "tar -xf {path}"
        if title:
            message = f"{path} is {title}, not text in UTF-8"
            problems.append(Problem(kind="not-text", message=message, hint=hint.format(path=path), where=str(path)))
        if len(problems) == NAMED:
            break
    if problems:
        raise UserError(*problems)


def _unreadable(path: Path, error: Exception) -> Problem:
    message = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
    return Problem(kind="unreadable", message=message, hint="check its completeness and permissions", where=str(path))
