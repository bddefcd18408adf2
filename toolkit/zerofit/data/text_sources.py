"""Sources of text: Python's own library, files; documents, a hash of them, and their validation part."""

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

from zerofit.data.hashing import held_out_limit, name_hash, text_digest
from zerofit.data.plain_files import is_compressed, open_plain, plain_size, refuse_others, skip
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

HELD_OUT = 0.05  # share of the text that becomes validation data where a source brings no split of its own
WHOLE_DOCUMENTS_FROM = 20  # from so many documents on, whole ones are held out
MANY = 200_000  # so many names are not sorted: their hashes are evenly enough spread
NAMED = 20  # problems that an error lists
CHUNK_BYTES = 1 << 22
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
)


class TextPiece(NamedTuple):
    """Consecutive text of one document."""

    text: str
    held_out: bool  # it is validation text
    ends: bool  # the document, or its part before the held-out one, ends here


class Survey(NamedTuple):
    """The result of one pass over the raw bytes of a source."""

    digest: str  # of names and content
    documents: int


class Source(ABC):
    """Documents, in a fixed order."""

    name: str  # as shown to the user

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes when a file is added, removed or written to, without reading the files."""

    @abstractmethod
    def survey(self, progress: Reporter) -> Survey:
        """Hash all content and count the documents. Raises UserError "empty-data"."""

    def size_bytes(self) -> int | None:
        """Return the bytes of text, for the progress bar; None where that is not known."""
        return None


class TextSource(Source):
    """Documents of plain text."""

    @abstractmethod
    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """Yield all text, a few MB (or one jsonl line) at a time at most. Raises UserError with every bad place."""


def held_out_hash(names: Iterable[str], documents: int, whole: bool = False) -> int:
    """Return the name hash up to which documents are validation data: 5 % of them, and at least one.

    -1 with fewer than 20 documents: then the end of each document is held out, unless they are to stay `whole`.
    """
    if documents < WHOLE_DOCUMENTS_FROM and not whole:
        return -1
    if documents > MANY:
        return int(HELD_OUT * 2**64)
    hashes = np.fromiter((name_hash(name) for name in names), dtype=np.uint64)
    return held_out_limit(hashes, HELD_OUT) if len(hashes) else -1


def split_text(name: str, text: str, limit: int) -> Iterator[TextPiece]:
    """Yield a document as one piece, or, where documents are few, as its first 95 % and the rest."""
    if limit >= 0:
        yield TextPiece(text, name_hash(name) <= limit, True)
        return
    cut = round(len(text) * (1 - HELD_OUT))
    cut = text.find("\n", cut, len(text) - 1) + 1 or cut
    yield TextPiece(text[:cut], False, True)
    yield TextPiece(text[cut:], True, True)


@dataclass(frozen=True, kw_only=True)
class FileSet(Source):
    """Files, each one a document."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that orders and splits them, where it is)

    def fingerprint(self) -> str:
        """Hash names, sizes and times of change."""
        facts = ((path, path.stat()) for _, path in self.files)
        return text_digest(*(f"{path}\0{s.st_size}\0{s.st_mtime_ns}" for path, s in facts))

    def survey(self, progress: Reporter) -> Survey:
        """Hash all names (which decide the split) and all bytes, in order; each file is a document."""
        state = hashlib.blake2b(digest_size=16)
        with progress.task(f"{self.name}: looking for tokens made before", self.size_bytes(), "bytes") as task:
            for name, path in self.files:
                state.update(f"\0{name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        state.update(chunk)
                        task.advance(len(chunk))
        return Survey(state.hexdigest(), len(self.files))

    def size_bytes(self) -> int | None:
        """Sum the files' sizes; None where some are compressed."""
        if any(is_compressed(path) for _, path in self.files):
            return None
        return sum(path.stat().st_size for _, path in self.files)


@dataclass(frozen=True, kw_only=True)
class FileSource(FileSet, TextSource):
    """Files, each one a document of plain text."""

    errors: str = "strict"  # what happens to bytes that are not UTF-8

    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """See Source.pieces; files that are not UTF-8 are named with line and column."""
        limit = held_out_hash((name for name, _ in self.files), documents)
        problems: list[Problem] = []
        for name, path in self.files:
            try:
                yield from self._file_pieces(name, path, limit)
            except UnicodeDecodeError:
                problems.append(_not_utf8(path))
            if len(problems) >= NAMED:
                break
        if problems:
            raise UserError(*problems)

    def _file_pieces(self, name: str, path: Path, limit: int) -> Iterator[TextPiece]:
        size = plain_size(path)
        if limit >= 0:
            yield from _segment(path, 0, size, self.errors, held_out=name_hash(name) <= limit)
            return
        cut = _cut_at_line(path, round(size * (1 - HELD_OUT)), size)
        yield from _segment(path, 0, cut, self.errors, held_out=False)
        yield from _segment(path, cut, size, self.errors, held_out=True)


def _cut_at_line(path: Path, wanted: int, size: int) -> int:
    """Return where the first line at or after `wanted` begins; without one, the first character."""
    with open_plain(path) as file:
        skip(file, wanted)
        tail = file.read(CHUNK_BYTES)
    line = tail.find(b"\n") + 1
    if line and wanted + line < size:
        return wanted + line
    inside = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), 0)
    return wanted + inside


def _segment(path: Path, start: int, stop: int, errors: str, *, held_out: bool) -> Iterator[TextPiece]:
    """Yield bytes start..stop of a file, in pieces that end with a line where lines are not absurdly long."""
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")(errors)
    with open_plain(path) as file:
        skip(file, start)
        while start < stop:
            raw = file.read(min(CHUNK_BYTES, stop - start))
            raw += file.readline(min(CHUNK_BYTES, stop - start - len(raw)))
            start = start + len(raw) if raw else stop
            yield TextPiece(decoder.decode(raw, final=start >= stop), held_out, start >= stop)


def _not_utf8(path: Path) -> Problem:
    """Name the first place of a file that is not UTF-8 as file:line:column (columns count bytes, from 1)."""
    with open_plain(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                where = f"{path}:{number}:{error.start + 1}"
                message = f"{where}: byte 0x{line[error.start]:02x} is not UTF-8"
                return Problem(kind="not-utf8", message=message, hint=not_utf8_hint(path), where=where)
    raise AssertionError(f"{path} was not UTF-8 a moment ago")


def not_utf8_hint(path: Path) -> str:
    """Return what to do with a file that is text in another encoding."""
    return f"iconv -f ENCODING -t utf-8 {path} > NEW converts it (latin1, cp1252, gb18030, ...)"


def open_pysource(run: Run, argument: str) -> Source:
    """Open the Python files of the running interpreter's standard library, ordered by relative path.

    Without installed packages, tests, idlelib and lib2to3. 5 % of the files, by hash of the path, are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple((name, root / name) for name in sorted(_library_files(root)))
    if not files:
        message = f"--data pysource: {root} holds no Python source (a stripped interpreter?)"
        raise UserError(Problem(kind="empty-data", message=message, hint="--data text:GLOB", where="--data"))
    return FileSource(name="pysource", files=files, errors="replace")


def _library_files(root: Path) -> Iterator[str]:
    """Yield relative paths of Python files, without walking through installed packages, often far more."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py"))


def open_text(run: Run, argument: str) -> Source:
    """Open files as documents, UTF-8, ordered by path.

    With 20 files or more, 5 % of them (by hash of the path below the glob's fixed folder) are held out; with fewer,
    the last 5 % of the bytes of each, cut at a line's end. Raises UserError "empty-data" when nothing matches.
    """
    return FileSource(name=f"text:{argument}", files=matching_files("text", argument))


def matching_files(kind: str, pattern: str) -> tuple[tuple[str, Path], ...]:
    """Return (path relative to the fixed part of the pattern, path): a moved folder keeps its split and its cache."""
    full = str(Path(pattern).expanduser())
    found = sorted(Path(p).absolute() for p in glob.glob(full, recursive=True) if Path(p).is_file())
    if not found:
        message = f"--data {kind}:{pattern} matches no file"
        folder = Path(full).is_dir()
        hint = f"a folder needs a pattern: {kind}:{pattern.rstrip('/')}/*" if folder else "check the path; quote the *"
        raise UserError(Problem(kind="empty-data", message=message, hint=hint, where="--data"))
    refuse_others(found, NAMED)
    root = Path(glob.escape(full) if Path(full).is_file() else full).absolute()
    while glob.has_magic(str(root)) or root.is_file():
        root = root.parent
    return tuple((path.relative_to(root).as_posix(), path) for path in found)
