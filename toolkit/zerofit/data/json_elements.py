"""Values of a JSON file that spread over several lines: an array's elements, or consecutive values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, NamedTuple

from zerofit.data.plain_files import MARK

CHUNK_CHARACTERS = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonElement(NamedTuple):
    """The text of one value and its position."""

    raw: bytes
    line: int  # from 1
    column: int  # from 1, in characters


def is_spread(line: bytes) -> bool:
    """Return whether a file with this first line has an array, or values spread over several lines."""
    text = line.decode("utf-8-sig", "replace").strip()
    if text.startswith("["):
        return True
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return line.endswith(b"\n") and text.startswith("{") and error.pos >= len(text)  # it continues on the next line
    except (RecursionError, ValueError):
        pass
    return False


def elements(file: IO[bytes]) -> Iterator[JsonElement]:
    """Yield the elements of an array, or consecutive values; if something is unreadable, it comes last.

    Only a part of the file is in memory at a time, at least one element. Bytes that are not UTF-8 are kept.
    """
    text = _Window(file)
    array = text.next() == "["
    if array:
        text.at += 1
    separated = True  # an element may start here
    while character := text.next():
        if array and character == "]":
            text.at += 1
            if text.next():
                yield text.rest()
            return
        if array and character == "," and not separated:
            text.at, separated = text.at + 1, True
            continue
        if (array and not separated) or (element := text.element()) is None:
            yield text.rest()
            return
        yield element
        separated = False
    if array:
        yield text.rest()


class _Window:
    """The part of a file that is in memory."""

    def __init__(self, file: IO[bytes]):
        self._file, self._decoder = file, json.JSONDecoder()
        self._text, self.at, self._line, self._line_start = "", 0, 1, 0
        self._tail, self._ended = file.read(len(MARK)).removeprefix(MARK), False
        self._more()

    def next(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            found = _SPACE.match(self._text, self.at)
            assert found
            self._count(found.end())
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._more()

    def element(self) -> JsonElement | None:
        """Return the value that starts here; None if it is incomplete or invalid."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self.at)
                break
            except json.JSONDecodeError:
                if self._ended:
                    return None
                self._more()
            except (RecursionError, ValueError):  # the reader of records reports the reason
                return None
        return self._taken(end)

    def rest(self) -> JsonElement:
        """Return the remaining text, or its beginning."""
        return self._taken(min(len(self._text), self.at + CHUNK_CHARACTERS))

    def _taken(self, end: int) -> JsonElement:
        place = self._line, self.at - self._line_start + 1
        raw = self._text[self.at : end].encode("utf-8", "surrogateescape")
        self._count(end)
        return JsonElement(raw, *place)

    def _count(self, end: int) -> None:
        """Advance to `end` and count lines."""
        if lines := self._text.count("\n", self.at, end):
            self._line, self._line_start = self._line + lines, self._text.rindex("\n", self.at, end) + 1
        self.at = end

    def _more(self) -> None:
        """Read more text: at least as much as is still unparsed."""
        kept = self._text[self.at :]
        read = self._tail + self._file.read(max(CHUNK_CHARACTERS, len(kept)))
        self._ended = len(read) == len(self._tail)
        cut = len(read) if self._ended else _character_end(read)
        self._tail = read[cut:]
        self._line_start -= self.at
        self._text, self.at = kept + read[:cut].decode("utf-8", "surrogateescape"), 0


def _character_end(read: bytes) -> int:
    """Return the start of a last, possibly incomplete character; the length if all are complete."""
    for back in range(1, min(4, len(read)) + 1):
        byte = read[-back]
        if byte >= 0xC0:
            return len(read) - back
        if byte < 0x80:
            break
    return len(read)
