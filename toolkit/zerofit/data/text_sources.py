"""Sources of text: the user's files, or Python's own library.

    Source           documents in a fixed order, a fingerprint and a hash of their content
    ├─ TextSource    yields the text of its documents in pieces
    └─ RecordSource  yields records with named fields, which `ChatSource` reads as conversations

FileSet is a Source of files; `jsonl` and `hf` have others. Each source holds out a part of the text for validation.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerofit.data.base import data_error
from zerofit.data.chat_records import ChatForm, ChatMessages, Record, conversation_of
from zerofit.data.hashing import held_out_limit, name_hash, text_digest
from zerofit.data.plain_files import is_compressed, open_plain, plain_size, refuse_others, skip
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

HELD_OUT = 0.05  # share of the text held out for validation if a source has no split
WHOLE_DOCUMENTS_FROM = 20  # from this many documents on, full documents are held out
MANY = 200_000  # above this number, names are not sorted: their hashes are uniform enough

CHUNK_BYTES = 1 << 22
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
)


class TextPiece(NamedTuple):
    """Consecutive text of one document."""

    text: str
    held_out: bool  # belongs to validation data
    ends: bool  # whether the document or its training part ends here


class Survey(NamedTuple):
    """The result of one pass over the raw bytes of a source."""

    digest: str  # hash of names and content
    documents: int


class Source(ABC):
    """Documents in a fixed order."""

    name: str  # as shown to the user

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes if a file is added, removed or modified; reads no file."""

    @abstractmethod
    def survey(self, progress: Reporter) -> Survey:
        """Hash all content and count the documents. Raises UserError "empty-data"."""

    def size_bytes(self) -> int | None:
        """Return the number of bytes of text, for the progress bar; None if unknown."""
        return None


class TextSource(Source):
    """Documents of plain text."""

    @abstractmethod
    def pieces(self, documents: int) -> Iterator[TextPiece | Problem]:
        """Yield all text, at most a few MB (or one jsonl line) at a time, and all bad places."""


class PlacedRecord(NamedTuple):
    """One record of a source."""

    values: Record
    where: str  # for messages about it
    held_out: bool  # belongs to validation data


class RecordSource(Source):
    """Records with named fields."""

    @abstractmethod
    def records(self, documents: int) -> Iterator[PlacedRecord | Problem]:
        """Yield all records, and all bad places. Some records are held out, at least one."""

    def class_names(self, field: str) -> tuple[str, ...]:
        """Return the data's own names for the class numbers in `field`; () without such names."""
        return ()


class ChatPiece(NamedTuple):
    """One conversation of a source."""

    conversation: ChatMessages
    where: str  # for messages about it
    held_out: bool  # belongs to validation data


@dataclass(frozen=True, kw_only=True)
class ChatSource:
    """Records with one conversation each."""

    records: RecordSource
    form: ChatForm

    def pieces(self, documents: int) -> Iterator[ChatPiece | Problem]:
        """Yield all conversations, and for each invalid record the reason."""
        for record in self.records.records(documents):
            if isinstance(record, Problem):
                yield record
                continue
            conversation = conversation_of(record.values, self.form)
            if isinstance(conversation, ChatMessages):
                yield ChatPiece(conversation, record.where, record.held_out)
            else:
                message, hint = f"{record.where}: {conversation}", self.form.hint(record.values)
                yield Problem(kind="bad-chat", message=message, hint=hint, where=record.where)


def held_out_hash(names: Iterable[str], documents: int, whole_documents: bool = False) -> int:
    """Return the largest hash of a held-out document's name; 5 % are held out, at least one.

    For fewer than 20 documents return -1: the end of each document is held out instead. `whole_documents`: hold out
    full documents even then.
    """
    if documents < WHOLE_DOCUMENTS_FROM and not whole_documents:
        return -1
    if documents > MANY:
        return int(HELD_OUT * 2**64)
    hashes = np.fromiter((name_hash(name) for name in names), dtype=np.uint64)
    return held_out_limit(hashes, HELD_OUT) if len(hashes) else -1


# With few documents, a full document would be too large a part to hold out. Then the end of each document is held out,
# since sentences from random places would leak training text into the validation part.
def split_text(name: str, text: str, limit: int) -> Iterator[TextPiece]:
    """Yield a document in one piece or, for a negative limit, its first 95 % and its last 5 %."""
    if limit >= 0:
        yield TextPiece(text, name_hash(name) <= limit, True)
        return
    cut = round(len(text) * (1 - HELD_OUT))
    cut = text.find("\n", cut, len(text) - 1) + 1 or cut
    yield TextPiece(text[:cut], False, True)
    yield TextPiece(text[cut:], True, True)


@dataclass(frozen=True, kw_only=True)
class FileSet(Source):
    """Files that are one document each."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (name for order and split, path)

    def fingerprint(self) -> str:
        """Hash names, sizes and modification times."""
        facts = ((path, path.stat()) for _, path in self.files)
        return text_digest(*(f"{path}\0{s.st_size}\0{s.st_mtime_ns}" for path, s in facts))

    def survey(self, progress: Reporter) -> Survey:
        """Hash all names, which decide the split, and all bytes, in order; each file is a document."""
        state = hashlib.blake2b(digest_size=16)
        with progress.task(f"{self.name}: looking for cached tokens", self.size_bytes(), "bytes") as task:
            for name, path in self.files:
                state.update(f"\0{name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        state.update(chunk)
                        task.advance(len(chunk))
        return Survey(state.hexdigest(), len(self.files))

    def size_bytes(self) -> int | None:
        """Return the sum of the file sizes; None if some are compressed."""
        if any(is_compressed(path) for _, path in self.files):
            return None
        return sum(path.stat().st_size for _, path in self.files)


@dataclass(frozen=True, kw_only=True)
class FileSource(FileSet, TextSource):
    """Plain text files that are one document each."""

    errors: str = "strict"  # handling of bytes that are not UTF-8

    def pieces(self, documents: int) -> Iterator[TextPiece | Problem]:
        """See TextSource.pieces; reports files that are not UTF-8 with line and column."""
        limit = held_out_hash((name for name, _ in self.files), documents)
        for name, path in self.files:
            try:
                yield from self._file_pieces(name, path, limit)
            except UnicodeDecodeError:
                yield _not_utf8(path)

    def _file_pieces(self, name: str, path: Path, limit: int) -> Iterator[TextPiece]:
        """Do what `split_text` does, without reading the file into memory."""
        size = plain_size(path)
        if limit >= 0:
            yield from _segment(path, 0, size, self.errors, held_out=name_hash(name) <= limit)
            return
        cut = _cut_at_line(path, round(size * (1 - HELD_OUT)), size)
        yield from _segment(path, 0, cut, self.errors, held_out=False)
        yield from _segment(path, cut, size, self.errors, held_out=True)


def _cut_at_line(path: Path, wanted: int, size: int) -> int:
    """Return the offset of the next line after the byte `wanted`, else of the next character."""
    with open_plain(path) as file:
        skip(file, wanted)
        tail = file.read(CHUNK_BYTES)
    line = tail.find(b"\n") + 1
    if line and wanted + line < size:
        return wanted + line
    # In UTF-8, the bytes of a character after its first are 10xxxxxx.
    character = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail))
    return wanted + character


def _segment(path: Path, start: int, stop: int, errors: str, *, held_out: bool) -> Iterator[TextPiece]:
    """Yield bytes start..stop of a file, in pieces that end with a line unless lines are long."""
    # A byte order mark is only at the start of a file. A piece of a long line may end within a character, whose bytes
    # an incremental decoder keeps for the next piece.
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")(errors)
    with open_plain(path) as file:
        skip(file, start)
        while start < stop:
            raw = file.read(min(CHUNK_BYTES, stop - start))
            raw += file.readline(min(CHUNK_BYTES, stop - start - len(raw)))
            start = start + len(raw) if raw else stop
            yield TextPiece(decoder.decode(raw, final=start >= stop), held_out, start >= stop)


def _not_utf8(path: Path) -> Problem:
    """Return a problem for the first byte that is not UTF-8; columns count bytes, from 1."""
    with open_plain(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                where = f"{path}:{number}:{error.start + 1}"
                message = f"{where}: byte 0x{line[error.start]:02x} is not UTF-8"
                return Problem(kind="not-utf8", message=message, hint=not_utf8_hint(path), where=where)
    raise AssertionError(f"{path}: decoding failed, but every line is UTF-8")


def not_utf8_hint(path: Path) -> str:
    """Return the hint for a file in another encoding."""
    return f"convert it: iconv -f ENCODING -t utf-8 {path} > NEW (latin1, cp1252, gb18030, ...)"


def open_pysource(run: Run, argument: str) -> TextSource:
    """Open the Python files of the interpreter's standard library, ordered by relative path.

    Skips installed packages, tests, idlelib and lib2to3. 5 % of the files, by hash of the path, are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, inner, in_folder in os.walk(root):
        # Assigned in place, so that os.walk does not enter the others: they may have more files than the library.
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        names += [Path(folder, name).relative_to(root).as_posix() for name in in_folder if name.endswith(".py")]
    files = tuple((name, root / name) for name in sorted(names))
    if not files:
        message = f"--data pysource: no Python source in {root} (a stripped interpreter?)"
        raise data_error("empty-data", message, "use --data text:GLOB")
    return FileSource(name="pysource", files=files, errors="replace")


def open_text(run: Run, argument: str) -> TextSource:
    """Open files as documents, UTF-8, ordered by path.

    From 20 files on, 5 % of them are held out, by the hash of the path below the glob's fixed folder. With fewer files,
    the last 5 % of the bytes of each file are held out, cut at the end of a line. Raises UserError "empty-data" if
    nothing matches.
    """
    return FileSource(name=f"text:{argument}", files=matching_files("text", argument))


def matching_files(kind: str, pattern: str) -> tuple[tuple[str, Path], ...]:
    """Return each file's path relative to the fixed part of `pattern`, and its path.

    Raises UserError if no file matches, or if files are not text.
    """
    full = str(Path(pattern).expanduser())
    full = glob.escape(full) if Path(full).is_file() else full  # its path may have brackets
    paths = sorted(Path(p).absolute() for p in glob.glob(full, recursive=True) if Path(p).is_file())
    if not paths:
        message = f"--data {kind}:{pattern} matches no file"
        folder = Path(full).is_dir()
        hint = f"use a pattern: {kind}:{pattern.rstrip('/')}/*" if folder else "check the path; quote the *"
        raise data_error("empty-data", message, hint)
    refuse_others(paths)
    # Split and cache depend on the relative path, so they survive if the folder is moved.
    root = Path(full).absolute()
    while glob.has_magic(str(root)) or root.is_file():
        root = root.parent
    return tuple((path.relative_to(root).as_posix(), path) for path in paths)
