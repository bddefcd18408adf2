"""What a source of text gives: a cheap fingerprint, a hash of its content, and its documents piece by piece."""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerofit.data.hashing import held_out_limit, name_hash, text_digest
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter

HELD_OUT = 0.05  # share of the text that becomes validation data where a source brings no split of its own
WHOLE_DOCUMENTS_FROM = 20  # from so many documents on, whole ones are held out
MANY = 200_000  # so many names are not sorted: their hashes are evenly enough spread
NAMED = 20  # problems that an error lists
CHUNK_BYTES = 1 << 22


class TextPiece(NamedTuple):
    """Consecutive text of one document."""

    text: str
    held_out: bool  # it is validation text
    ends: bool  # the document, or its part before the held-out one, ends here


class Survey(NamedTuple):
    """What one pass over the raw bytes of a source finds."""

    digest: str  # of names and content
    documents: int


class Source(ABC):
    """Documents of text, in a fixed order."""

    name: str  # as shown to the user

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when a file is added, removed or written to; found without reading the files."""

    @abstractmethod
    def survey(self, progress: Reporter) -> Survey:
        """Hash all content and count the documents. Raises UserError "empty-data"."""

    @abstractmethod
    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """All text, never more than a few MB (or one jsonl line) at a time. Raises UserError with every bad place."""

    def size_bytes(self) -> int | None:
        """Bytes of text, for the progress bar; None where that is not known."""
        return None


def held_out_hash(names: Iterable[str], documents: int) -> int:
    """Documents whose name hashes to at most this are validation data: 5 % of them, and at least one.

    -1 with fewer than 20 documents: then the end of each document is held out.
    """
    if documents < WHOLE_DOCUMENTS_FROM:
        return -1
    if documents > MANY:
        return int(HELD_OUT * 2**64)
    hashes = np.fromiter((name_hash(name) for name in names), dtype=np.uint64, count=documents)
    return held_out_limit(hashes, HELD_OUT)


def split_text(name: str, text: str, limit: int) -> Iterator[TextPiece]:
    """One document as one piece, or, where documents are few, as its first 95 % and the rest."""
    if limit >= 0:
        yield TextPiece(text, name_hash(name) <= limit, True)
        return
    cut = round(len(text) * (1 - HELD_OUT))
    cut = text.find("\n", cut, len(text) - 1) + 1 or cut
    yield TextPiece(text[:cut], False, True)
    yield TextPiece(text[cut:], True, True)


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """One document a file."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that orders and splits them, where it is)
    errors: str = "strict"  # what happens to bytes that are not UTF-8

    def fingerprint(self) -> str:
        """Names, sizes and times of change."""
        return files_fingerprint(self.files)

    def survey(self, progress: Reporter) -> Survey:
        """One document for each file."""
        return Survey(hash_files(self.name, self.files, progress), len(self.files))

    def size_bytes(self) -> int:
        """The sum of the files' sizes."""
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """See Source.pieces; files that are not UTF-8 are named with line and column."""
        limit = held_out_hash((name for name, _ in self.files), documents)
        problems: list[Problem] = []
        for name, path in self.files:
            try:
                yield from self._file_pieces(name, path, limit)
            except UnicodeDecodeError:
                problems.append(not_utf8(path))
            if len(problems) >= NAMED:
                break
        if problems:
            raise UserError(*problems)

    def _file_pieces(self, name: str, path: Path, limit: int) -> Iterator[TextPiece]:
        size = path.stat().st_size
        if limit >= 0:
            yield from _segment(path, 0, size, self.errors, held_out=name_hash(name) <= limit)
            return
        cut = _cut_at_line(path, round(size * (1 - HELD_OUT)), size)
        yield from _segment(path, 0, cut, self.errors, held_out=False)
        yield from _segment(path, cut, size, self.errors, held_out=True)


def _cut_at_line(path: Path, wanted: int, size: int) -> int:
    """The first line that begins at or after `wanted`; else the first character does."""
    with path.open("rb") as file:
        file.seek(wanted)
        tail = file.read(CHUNK_BYTES)
    line = tail.find(b"\n") + 1
    if line and wanted + line < size:
        return wanted + line
    inside = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), 0)
    return wanted + inside


def _segment(path: Path, start: int, stop: int, errors: str, *, held_out: bool) -> Iterator[TextPiece]:
    """Bytes start..stop of a file, in pieces that end with a line where lines are not absurdly long."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            raw = file.read(min(CHUNK_BYTES, stop - start))
            raw += file.readline(min(CHUNK_BYTES, stop - start - len(raw)))
            start = start + len(raw) if raw else stop
            yield TextPiece(decoder.decode(raw, final=start >= stop), held_out, start >= stop)


def files_fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Hash of names, sizes and times of change."""
    facts = ((path, path.stat()) for _, path in files)
    return text_digest(*(f"{path}\0{s.st_size}\0{s.st_mtime_ns}" for path, s in facts))


def hash_files(name: str, files: tuple[tuple[str, Path], ...], progress: Reporter) -> str:
    """Hash of all names (which decide the split) and all bytes, in order."""
    state = hashlib.blake2b(digest_size=16)
    total = sum(path.stat().st_size for _, path in files)
    with progress.task(f"{name}: looking for tokens made before", total, "bytes") as task:
        for relative, path in files:
            state.update(f"\0{relative}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    state.update(chunk)
                    task.advance(len(chunk))
    return state.hexdigest()


def not_utf8(path: Path) -> Problem:
    """Names the first place of a file that is not UTF-8 as file:line:column (columns count bytes, from 1)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                where = f"{path}:{number}:{error.start + 1}"
                message = f"{where}: byte 0x{line[error.start]:02x} is not UTF-8"
                return Problem(kind="not-utf8", message=message, hint="iconv -t utf-8 converts it", where=where)
    raise AssertionError(f"{path} was not UTF-8 a moment ago")
