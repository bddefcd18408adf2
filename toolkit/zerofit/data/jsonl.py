"""JSON records, one per line or in an array: each has a text field or a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import IO, NamedTuple

from zerofit.data.chat_records import field_hint, form_of, refused_record
from zerofit.data.hashing import name_hash
from zerofit.data.plain_files import MARK, open_plain
from zerofit.data.text_sources import (
    ChatSource,
    FileSet,
    PlacedRecord,
    RecordSource,
    Survey,
    TextPiece,
    TextSource,
    held_out_hash,
    matching_files,
    not_utf8_hint,
    split_text,
)
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.foreign import Unreadable, parse_json
from zerofit.spec.run import Run

CHUNK_CHARACTERS = 1 << 20
PART_BYTES = 1 << 16  # of the beginning and the end of a long line, to check whether it is one record
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonLine(NamedTuple):
    """A record: a line that is not blank, or an element of an array."""

    name: str  # of its file, for order and split
    path: Path
    number: int  # number of the line or element, from 1
    raw: bytes
    line: int  # line where it begins
    start: int = 1  # column where it begins

    @property
    def key(self) -> str:
        """The name of the document, whose hash decides whether it is held out."""
        return f"{self.name}:{self.number}"

    def problem(self, kind: str, message: str, hint: str, line: int = 1, column: int = 1) -> Problem:
        """Return a problem of the record, at a line and column within it."""
        where = f"{self.path}:{self.line + line - 1}:{column + (self.start - 1 if line == 1 else 0)}"
        return Problem(kind=kind, message=f"{where}: {message}", hint=hint, where=where)

    def read(self) -> dict | Problem:
        """Return the record's object, or a problem with it."""
        try:
            row = parse_json(self.raw.decode())
        except UnicodeDecodeError as error:
            before, byte = self.raw[: error.start], self.raw[error.start]
            line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
            message = f"byte 0x{byte:02x} is not UTF-8"
            return self.problem("bad-jsonl", message, not_utf8_hint(self.path), line, column)
        except Unreadable as error:
            hint = "use one JSON object per line, or one array of objects"
            if b"\0" in self.raw:
                message = "NUL bytes, from an interrupted write or UTF-16 without a byte order mark"
                return self.problem("bad-jsonl", message, "remove this line, or convert the file to UTF-8")
            return self.problem("bad-jsonl", f"not JSON: {error.reason}", hint, error.line or 1, error.column or 1)
        # A list of objects is a conversation without the object around its messages.
        if isinstance(row, list) and row and all(isinstance(message, dict) for message in row):
            return {"messages": row}
        if not isinstance(row, dict):
            message = f"expected a JSON object, got {type(row).__name__}"
            return self.problem("bad-jsonl", message, 'use {"text": "..."}, or {"messages": [...]}')
        return row


@dataclass(frozen=True, kw_only=True)
class JsonlSet(FileSet, RecordSource):
    """Files of records, each a document; only its text field or conversation (`what`) is read."""

    what: str  # name of a field, or a format of conversations

    def fingerprint(self) -> str:
        """Hash names, sizes, modification times and `what`."""
        return super().fingerprint() + self.what

    def survey(self, progress: Reporter) -> Survey:
        """Count the records, which are the documents."""
        return Survey(super().survey(progress).digest + self.what, sum(1 for _ in self.lines()))

    def lines(self) -> Iterator[JsonLine]:
        """Yield the lines that are not blank, or elements if arrays or objects span several lines."""
        for name, path in self.files:
            # Compressed files cannot be seeked, so each file is opened twice.
            with open_plain(path) as file:
                # Only the first two lines decide how the file is read. The empty lines stand for lines that a short
                # file lacks.
                first, second = islice(chain(filter(bytes.strip, _bounded_lines(file)), repeat(b"")), 2)
            with open_plain(path) as file:
                if is_spread(first, second):
                    for number, (raw, line, column) in enumerate(elements(file), 1):
                        yield JsonLine(name, path, number, raw, line, column)
                    continue
                for number, raw in enumerate(file, 1):
                    raw = raw.removeprefix(MARK)  # joined files have several
                    if raw.strip():
                        yield JsonLine(name, path, number, raw, number)

    def records(self, documents: int) -> Iterator[PlacedRecord | Problem]:
        """See RecordSource.records; 5 % of the lines are held out."""
        limit = held_out_hash((line.key for line in self.lines()), documents, whole_documents=True)
        for line in self.lines():
            row, column = line.read(), f":{line.start}" if line.start > 1 else ""
            where, held_out = f"{line.path}:{line.line}{column}", name_hash(line.key) <= limit
            yield row if isinstance(row, Problem) else PlacedRecord(row, where, held_out)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(JsonlSet, TextSource):
    """Files with one document per line, in a field of a JSON object."""

    def pieces(self, documents: int) -> Iterator[TextPiece | Problem]:
        """See TextSource.pieces; reports bad lines as file:line:column."""
        limit = held_out_hash((line.key for line in self.lines()), documents)
        for line in self.lines():
            text = _text_of(line, self.what)
            if isinstance(text, str):
                yield from split_text(line.key, text, limit)
            else:
                yield text


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line; of a long line only its beginning, a NUL and its end."""
    # A file without line ends is one line, which may be larger than memory.
    while line := file.readline(PART_BYTES):
        end = line
        while not end.endswith(b"\n") and (more := file.readline(PART_BYTES)):
            end = end[-PART_BYTES:] + more
        yield line if end is line else line + b"\0" + end


def _text_of(line: JsonLine, field: str) -> str | Problem:
    """Return the text in a field of a line's object, or a problem with it."""
    row = line.read()
    if isinstance(row, Problem):
        return row
    if field not in row:
        message = f"no field {field!r}; the record has {', '.join(row) or 'none'}"
        return line.problem("bad-jsonl", message, field_hint(row, field))
    if not isinstance(row[field], str):
        message = f"field {field!r} is {type(row[field]).__name__}, not a string"
        return line.problem("bad-jsonl", message, "set --text-field to another field")
    return row[field]


def open_jsonl(run: Run, argument: str) -> TextSource | ChatSource:
    """Open records as documents: texts in the field `run.text_field`, or conversations.

    From 20 documents on, 5 % of the documents are held out, by the hash of file and number. With fewer than 20 texts,
    the last 5 % of each text is held out. With fewer than 20 conversations, one conversation is held out. Raises
    UserError "empty-data" if no file matches.
    """
    name, files = f"jsonl:{argument}", matching_files("jsonl", argument)
    source = JsonlSource(name=name, files=files, what=run.text_field)
    # The first readable record decides for all: texts if it has the field, else conversations.
    rows = (row for row in map(JsonLine.read, source.lines()) if isinstance(row, dict))
    first = next(rows, {})
    if problem := refused_record(first, run.text_field, name):
        raise UserError(problem)
    form = form_of(first, run.text_field)
    return ChatSource(records=JsonlSet(name=name, files=files, what=form.title), form=form) if form else source


class JsonElement(NamedTuple):
    """The text of one value and its position."""

    raw: bytes
    line: int  # from 1
    column: int  # from 1, in characters


def is_spread(line: bytes, following: bytes = b"") -> bool:
    """Return whether a file is one array, or its values span or share lines, by its first lines."""
    text = line.decode("utf-8-sig", "replace").strip()
    if text.startswith("["):
        # Lines that are lists of messages: each of them starts with a bracket.
        return not (text.endswith("]") and line.endswith(b"\n") and following.lstrip().startswith(b"["))
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        # The parser reached the end of the line within a value.
        if error.pos >= len(text):
            return line.endswith(b"\n") and text.startswith("{")  # continues on the next line
        return error.msg == "Extra data" and text[error.pos] in "{,"
    except (RecursionError, ValueError):  # the reader of records reports the reason
        pass
    return False


def elements(file: IO[bytes]) -> Iterator[JsonElement]:
    """Yield the elements of an array, or consecutive values with or without commas.

    An unreadable part comes last, as it is. Bytes that are not UTF-8 are kept.
    """
    window = _Window(file)
    array = window.next() == "["
    if array:
        window.at += 1
    separated = True  # an element may start here
    while character := window.next():
        if array and character == "]":
            window.at += 1
            if window.next():  # more text after the array
                yield window.rest()
            return
        if character == "," and not separated:
            window.at, separated = window.at + 1, True
            continue
        if (array and not separated) or (element := window.element()) is None:
            yield window.rest()
            return
        yield element
        separated = False
    if array:  # the array is not closed
        yield window.rest()


# An array may be larger than memory, and a parser needs all of an element. The window holds the text from the current
# element on. If the parser fails there, more is read until it succeeds or the file ends. Each read is at least as long
# as the unparsed text, so an element of n bytes is parsed log n times.
class _Window:
    """The part of a file that is in memory, and a position in it."""

    def __init__(self, file: IO[bytes]):
        self._file, self._decoder = file, json.JSONDecoder()
        self._text = ""
        self.at = 0  # the current position in `_text`
        self._line = 1  # its line
        self._line_start = 0  # where its line begins in `_text`; negative if before it
        self._tail = file.read(len(MARK)).removeprefix(MARK)  # read, but not decoded: may end within a character
        self._ended = False  # whether the file is read to its end
        self._read_more()

    def next(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self.at)
            assert space  # it matches the empty text, too
            self._advance(space.end())
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._read_more()

    def element(self) -> JsonElement | None:
        """Return the value at the current position; None if it is incomplete or invalid."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self.at)
                break
            except json.JSONDecodeError:
                if self._ended:
                    return None
                self._read_more()
            except (RecursionError, ValueError):  # the reader of records reports the reason
                return None
        return self._element_until(end)

    def rest(self) -> JsonElement:
        """Return the remaining text, or its beginning if it is long, as an element."""
        return self._element_until(min(len(self._text), self.at + CHUNK_CHARACTERS))

    def _element_until(self, end: int) -> JsonElement:
        """Return the text from the current position to `end`, and move there."""
        line, column = self._line, self.at - self._line_start + 1
        raw = self._text[self.at : end].encode("utf-8", "surrogateescape")
        self._advance(end)
        return JsonElement(raw, line, column)

    def _advance(self, end: int) -> None:
        """Move to the position `end`, and count the lines before it."""
        if lines := self._text.count("\n", self.at, end):
            self._line += lines
            self._line_start = self._text.rindex("\n", self.at, end) + 1
        self.at = end

    def _read_more(self) -> None:
        """Drop the text before the position, and read at least as much as is still unparsed."""
        unparsed = self._text[self.at :]
        read = self._tail + self._file.read(max(CHUNK_CHARACTERS, len(unparsed)))
        self._ended = len(read) == len(self._tail)
        cut = len(read) if self._ended else _character_end(read)
        self._tail = read[cut:]
        self._line_start -= self.at
        self._text, self.at = unparsed + read[:cut].decode("utf-8", "surrogateescape"), 0


def _character_end(read: bytes) -> int:
    """Return the start of the last character if it may be incomplete; otherwise the length."""
    for back in range(1, min(4, len(read)) + 1):
        byte = read[-back]
        if byte >= 0xC0:  # the first byte of a character of several bytes
            return len(read) - back
        if byte < 0x80:  # a character of one byte
            break
    return len(read)
