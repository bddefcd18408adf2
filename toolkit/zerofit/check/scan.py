"""A parser for JSON with comments and trailing commas, which DeepSpeed's hjson accepts.

All values have positions, which findings and edits need. The standard library's parser does not keep positions. This
parser is a recursive descent over regular expressions: `_at` is the offset of the next character, and `_value` reads
the value that begins there.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from zerofit.spec.foreign import Unreadable, parse_json

BLANK = re.compile(r"[ \t\r\n\ufeff]*")
COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*(?:[^*]|\*(?!/))*\*/")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
CONSTANT = re.compile(r"true|false|null")
CONSTANTS = {"true": True, "false": False, "null": None}
PYTHON = {"True": "true", "False": "false", "None": "null", "'": "a string in double quotes"}
MAX_DIGITS = 400  # a double has at most 309 before its point


@dataclass(frozen=True, kw_only=True)
class TextPosition:
    """A position in a text. Lines and columns count from 1, offsets from 0."""

    line: int
    column: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ParsedValue:
    """A value with its position, and the parts of an object or array."""

    place: TextPosition
    data: Any  # as json.loads returns it; for a duplicate key the last value
    members: tuple[ObjectMember, ...] = ()
    items: tuple[ParsedValue, ...] = ()

    @cached_property
    def by_key(self) -> dict[str, ObjectMember]:
        """Members by key; of duplicate keys, the last."""
        return {member.key: member for member in self.members}


@dataclass(frozen=True, kw_only=True)
class ObjectMember:
    """One `"key": value` of an object."""

    key: str
    place: TextPosition  # of the key
    value: ParsedValue


class SyntaxFault(Exception):
    """Raised for invalid JSON or YAML, with the place and what the parser expected there."""

    def __init__(self, message: str, line: int, column: int, *, final: bool = False, notation: str = "JSON"):
        super().__init__(message)
        self.message, self.line, self.column, self.notation = message, line, column, notation
        self.final = final  # invalid in HJSON too


class Scanner:
    """The parser of one text. It records where the text is not strict JSON."""

    def __init__(self, text: str):
        self.commas: list[TextPosition] = []  # after the last member of an object or array
        self.comment: TextPosition | None = None  # the first one
        self._text = text
        self._at = 0
        # Each key and value has a position. Counting line breaks for each of them would take quadratic time.
        self._line_ends = [found.start() for found in re.finditer("\n", text)]

    def read(self) -> ParsedValue:
        """Return the text's value. Raises SyntaxFault."""
        self._skip()
        try:
            root = self._value()
        except RecursionError:
            raise SyntaxFault("objects or arrays are nested too deeply", 1, 1) from None
        self._skip()
        if self._at < len(self._text):
            self._fail("the end of the text")
        return root

    def place(self, start: int, end: int) -> TextPosition:
        """Return the position of a part of the text."""
        line = bisect_left(self._line_ends, start)
        before = self._line_ends[line - 1] if line else -1
        return TextPosition(line=line + 1, column=start - before, start=start, end=end)

    def _skip(self) -> str:
        """Skip blanks and comments. Return the next character, or "" at the end."""
        text = self._text
        while True:
            self._at = BLANK.match(text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            found = COMMENT.match(text, self._at) if text[self._at : self._at + 1] in ("/", "#") else None
            if found is None:
                return text[self._at : self._at + 1]
            self.comment = self.comment or self.place(found.start(), found.end())
            self._at = found.end()

    def _value(self) -> ParsedValue:
        start, first = self._at, self._text[self._at : self._at + 1]
        if first == "{":
            members = self._members()
            place = self.place(start, self._at)
            return ParsedValue(place=place, data={m.key: m.value.data for m in members}, members=tuple(members))
        if first == "[":
            items = self._items()
            return ParsedValue(place=self.place(start, self._at), data=[i.data for i in items], items=tuple(items))
        if first == '"':
            data: object = self._string()
        elif found := NUMBER.match(self._text, start):
            self._at = found.end()
            data = self._number(found.group())
        elif found := CONSTANT.match(self._text, start):
            self._at = found.end()
            data = CONSTANTS[found.group()]
        else:
            self._fail("a value")
        return ParsedValue(place=self.place(start, self._at), data=data)

    def _members(self) -> list[ObjectMember]:
        members: list[ObjectMember] = []
        self._at += 1
        sign = self._skip()
        while sign != "}":
            start = self._at
            key = self._string()
            place = self.place(start, self._at)
            if self._skip() != ":":
                self._fail("a colon")
            self._at += 1
            self._skip()
            members.append(ObjectMember(key=key, place=place, value=self._value()))
            sign = self._next("}")
        self._at += 1
        return members

    def _items(self) -> list[ParsedValue]:
        items: list[ParsedValue] = []
        self._at += 1
        sign = self._skip()
        while sign != "]":
            items.append(self._value())
            sign = self._next("]")
        self._at += 1
        return items

    def _next(self, closing: str) -> str:
        """Skip the comma after an element, and record a trailing comma. Return the next character."""
        sign = self._skip()
        if sign == closing:
            return sign
        if sign != ",":
            self._fail(f"a comma or {closing}")
        comma = self._at
        self._at += 1
        sign = self._skip()
        if sign == closing:
            self.commas.append(self.place(comma, comma + 1))
        return sign

    def _string(self) -> str:
        found = STRING.match(self._text, self._at)
        if found is None:
            self._fail("a string in double quotes")
        self._at = found.end()
        if "\\" not in found.group():
            return found.group()[1:-1]
        # An escape may be half of a surrogate pair, which is no text.
        try:
            return parse_json(found.group())
        except Unreadable as error:
            place = self.place(found.start(), found.end())
            raise SyntaxFault(error.reason, place.line, place.column, final=True) from None

    def _number(self, word: str) -> float | int:
        # Python converts long integers only up to 4,300 digits, and 1e400 becomes infinity, which JSON does not have.
        if len(word) <= MAX_DIGITS and math.isfinite(float(word)):
            return int(word) if word.lstrip("-").isdigit() else float(word)
        shown = word if len(word) < 20 else f"a number of {len(word):,} characters"
        place = self.place(self._at - len(word), self._at)
        message = f"got {shown}, which is too large for a JSON number (above 1.8e308)"
        raise SyntaxFault(message, place.line, place.column, final=True)

    def _fail(self, expected: str) -> NoReturn:
        """Raise SyntaxFault at the next character, with the most likely cause."""
        place = self.place(self._at, self._at)
        rest = self._text[self._at : self._at + 12].split("\n")[0]
        python = re.match(r"True\b|False\b|None\b|'", rest)
        if not self._text.strip():
            message = "the file is empty"
        elif self._at >= len(self._text):
            message = "the text ends too early (a closing bracket is missing?)"
        elif python:
            message = f"got Python's {python.group()}; JSON needs {PYTHON[python.group()]}"
        else:
            message = f"got {rest!r}; expected {expected}"
        # HJSON would read True as the text "True", which nobody means.
        raise SyntaxFault(message, place.line, place.column, final=python is not None)
