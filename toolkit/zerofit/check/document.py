"""A DeepSpeed JSON as text: parsed with comments tolerated, every key and value with its place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

# As DeepSpeed's own reader (hjson) takes it: comments and a comma after the last member do no harm.
GRAMMAR = r"""
    start: value
    ?value: object | array | STRING | NUMBER | CONSTANT
    object: "{" [pair ("," pair)*] [comma] "}"
    array: "[" [value ("," value)*] [comma] "]"
    pair: STRING ":" value
    comma: COMMA
    COMMA: ","
    CONSTANT: "true" | "false" | "null"
    STRING: /"(?:[^"\\\x00-\x1f]|\\(?:["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
    NUMBER: /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/
    COMMENT: /\/\/[^\n]*|#[^\n]*|\/\*(?:[^*]|\*(?!\/))*\*\//
    %ignore COMMENT
    %ignore /[ \t\r\n\ufeff]+/
"""
MOST_DIGITS = 400  # a double has 309 before its point
_SPOKEN = {"COMMA": "a comma", "COLON": "a colon", "RBRACE": "}", "RSQB": "]", "STRING": "a string in double quotes"}


_COMMENTS: list[TextPosition] = []  # of the text that is being parsed: the parser has no other place for them


@dataclass(frozen=True, kw_only=True)
class TextPosition:
    """The place where something stands: line and column from 1 on, offsets into the text from 0 on."""

    line: int
    column: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ParsedValue:
    """A value with its place; objects and arrays hold their parts."""

    place: TextPosition
    data: Any  # as json.loads gives it; of a key that stands twice, the last value
    members: tuple[ObjectMember, ...] = ()
    items: tuple[ParsedValue, ...] = ()

    @cached_property
    def by_key(self) -> dict[str, ObjectMember]:
        """Members by key; of a key that stands twice, the last one."""
        return {member.key: member for member in self.members}


@dataclass(frozen=True, kw_only=True)
class ObjectMember:
    """One `"key": value` of an object."""

    key: str
    place: TextPosition  # of the key
    value: ParsedValue


class SyntaxFault(Exception):
    """The text is not valid JSON; says where and what was expected."""

    def __init__(self, message: str, line: int, column: int):
        super().__init__(message)
        self.message, self.line, self.column = message, line, column


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed JSON: its text, its root and what is tolerated but not strict JSON."""

    text: str
    root: ParsedValue
    generated: bool = False  # the user has never seen the text, its lines say nothing
    commas: tuple[TextPosition, ...] = ()  # after the last member of an object or array
    comment: TextPosition | None = None  # the first one
    places: Mapping[str, TextPosition] | None = None  # in the file, where `text` is another writing of it
    loose: SyntaxFault | None = None  # where JSON ends and HJSON begins

    @property
    def config(self) -> Any:
        """The plain value, as json.loads gives it."""
        return self.root.data

    def member(self, path: str) -> ObjectMember | None:
        """Return the member at a dotted path (the last one of that key), or None."""
        found = None
        value = self.root
        for key in path.split("."):
            found = value.by_key.get(key)
            if found is None:
                return None
            value = found.value
        return found

    def value(self, path: str) -> ParsedValue | None:
        """Return the value at a dotted path, at "" the root, or None."""
        member = self.member(path)
        return self.root if not path else member and member.value

    def place(self, path: str) -> TextPosition:
        """Return where a key stands; of a missing one, where the innermost object around it does."""
        while path:
            member = self.member(path)
            if self.places is not None and path in self.places:
                return self.places[path]
            if member and self.places is None:
                return member.place
            path = path.rpartition(".")[0]
        return self.root.place

    def duplicates(self) -> Iterator[tuple[str, ObjectMember, ObjectMember]]:
        """Yield dotted path of each key that stands more than once in one object, an earlier member and the last."""
        yield from _duplicates(self.root, "")


def _duplicates(value: ParsedValue, prefix: str) -> Iterator[tuple[str, ObjectMember, ObjectMember]]:
    last = {m.key: m for m in value.members}
    for member in value.members:
        path = f"{prefix}{member.key}"
        if member is not last[member.key]:
            yield path, member, last[member.key]
        yield from _duplicates(member.value, f"{path}.")
    for item in value.items:
        yield from _duplicates(item, f"{prefix}[].")


def parse(text: str) -> Document:
    """Parse a text. Raises SyntaxFault with line, column and what was expected there."""
    try:
        _COMMENTS.clear()
        tree = _parser().parse(text)
        commas: list[TextPosition] = []
        root = _value(tree.children[0], commas)
    except UnexpectedInput as error:
        raise _fault(error, text) from None
    except RecursionError:
        raise SyntaxFault("objects or arrays are nested too deeply to be a configuration", 1, 1) from None
    return Document(text=text, root=root, commas=tuple(commas), comment=_COMMENTS[0] if _COMMENTS else None)


def of_hjson(text: str, config: Any, fault: SyntaxFault) -> Document:
    """Return a document of a text that only DeepSpeed's own reader takes; keys stand in the lines that name them."""
    return replace(of_data(config), generated=False, places=dict(_places(config, text, "", 0)), loose=fault)


def _places(config: Any, text: str, prefix: str, after: int) -> Iterator[tuple[str, TextPosition]]:
    """Yield where each key of a text stands of which only the values are known: behind the key that holds it."""
    for key, value in config.items() if isinstance(config, dict) else ():
        found = re.compile(rf"(?<!\w){re.escape(key)}(?!\w)[\"']?\s*:").search(text, after)
        start = found.start() if found else after
        line = text.count("\n", 0, start) + 1
        column = start - text.rfind("\n", 0, start)
        yield f"{prefix}{key}", TextPosition(line=line, column=column, start=start, end=start + len(key))
        yield from _places(value, text, f"{prefix}{key}.", start)


def of_data(config: Any) -> Document:
    """Return a document of a value that never was a file (a `ds_config` inside run.yaml, say)."""
    return replace(parse(json.dumps(config, indent=2)), generated=True)


def of_lines(config: Any, lines: Mapping[str, int]) -> Document:
    """Return a document of a value that another file gives, by the lines in which that has its keys."""
    places: dict[str, TextPosition] = {}
    for path, line in sorted(lines.items(), key=lambda one: one[1]):
        parts = path.split(".")
        for n in range(1, len(parts) + 1):  # a section stands where its first key does
            places.setdefault(".".join(parts[:n]), TextPosition(line=line, column=1, start=0, end=0))
    return replace(of_data(config), places=places)


@cache
def _parser() -> Lark:
    return Lark(
        GRAMMAR,
        parser="lalr",
        propagate_positions=True,
        maybe_placeholders=False,
        lexer_callbacks={"COMMENT": _note_comment},
    )


def _note_comment(token: Token) -> Token:
    _COMMENTS.append(_place(token))
    return token


def _value(node: Tree | Token, commas: list[TextPosition]) -> ParsedValue:
    if isinstance(node, Token):
        return ParsedValue(place=_place(node), data=_scalar(node))
    place = _place(node.meta)
    parts = [c for c in node.children if not (isinstance(c, Tree) and c.data == "comma")]
    commas.extend(_place(c.meta) for c in node.children if isinstance(c, Tree) and c.data == "comma")
    if node.data == "array":
        items = tuple(_value(part, commas) for part in parts)
        return ParsedValue(place=place, data=[i.data for i in items], items=items)
    members = tuple(_member(part, commas) for part in parts)
    return ParsedValue(place=place, data={m.key: m.value.data for m in members}, members=members)


def _scalar(token: Token) -> Any:
    """Return the value of a token. Raises SyntaxFault for a number that no double holds."""
    if token.type == "NUMBER" and (len(token) > MOST_DIGITS or not math.isfinite(float(token))):
        shown = token if len(token) < 20 else f"a number of {len(token):,} characters"
        message = f"got {shown}, which is beyond what a number of JSON can be for any reader (1.8e308)"
        raise SyntaxFault(message, token.line or 1, token.column or 1)
    return json.loads(token)


def _member(pair: Tree, commas: list[TextPosition]) -> ObjectMember:
    key, value = pair.children
    assert isinstance(key, Token)  # see GRAMMAR
    return ObjectMember(key=json.loads(key), place=_place(key), value=_value(value, commas))


def _place(mark: Any) -> TextPosition:
    """Return the position of a token or a tree's meta, which name it alike."""
    return TextPosition(line=mark.line, column=mark.column, start=mark.start_pos, end=mark.end_pos)


def _fault(error: UnexpectedInput, text: str) -> SyntaxFault:
    if isinstance(error, UnexpectedEOF) or (isinstance(error, UnexpectedToken) and error.token.type == "$END"):
        lines = text.split("\n")
        return SyntaxFault("the text ends where more is expected (a closing bracket?)", len(lines), len(lines[-1]) + 1)
    if isinstance(error, UnexpectedCharacters):
        got = text[error.pos_in_stream : error.pos_in_stream + 12].split("\n")[0]
        expected = error.allowed
    else:
        assert isinstance(error, UnexpectedToken)
        got, expected = str(error.token), error.accepts or error.expected
    literal = re.match(r"True\b|False\b|None\b|'", text[_offset(error) :])
    if literal:
        python = {"True": "true", "False": "false", "None": "null", "'": "a string in double quotes"}[literal.group()]
        return SyntaxFault(f"got Python's {literal.group()} where JSON has {python}", error.line, error.column)
    spoken = sorted(_SPOKEN.get(name, name.lower()) for name in expected or () if not name.startswith("_"))
    return SyntaxFault(f"got {got!r} where JSON has {' or '.join(spoken[:6])}", error.line, error.column)


def _offset(error: UnexpectedInput) -> int:
    return error.pos_in_stream or 0
