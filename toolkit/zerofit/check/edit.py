"""Edits of a JSON's text that keep comments, order and the user's layout.

An edit replaces the characters between two offsets of the text. The text is parsed again for each edit, since the
offsets of all later keys have changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zerofit.check.document import Document
from zerofit.check.scan import ObjectMember, ParsedValue

# blanks and comments after a value, and its comma
TO_COMMA = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)*,")


@dataclass(frozen=True)
class Assignment:
    """Set the key at a dotted path; create missing parents."""

    path: str
    value: object


@dataclass(frozen=True)
class Removal:
    """Remove the key at a dotted path if it exists."""

    path: str


@dataclass(frozen=True)
class Renaming:
    """Rename the key at a dotted path, in the same object."""

    path: str
    key: str


@dataclass(frozen=True)
class Move:
    """Move the value at a dotted path to another path, unless the other path exists."""

    path: str
    to: str


@dataclass(frozen=True)
class Deletion:
    """Remove the text between two offsets of the checked text."""

    start: int
    end: int


Edit = Assignment | Removal | Renaming | Move | Deletion


def apply(document: Document, edits: Iterable[Edit]) -> str:
    """Return the edited text."""
    text = document.text
    # Several findings may have the same edit. An edit's value may be a dictionary, so a set cannot contain it.
    unique = {repr(edit): edit for edit in edits}.values()
    deletions: list[Deletion] = []
    for deletion in sorted((e for e in unique if isinstance(e, Deletion)), key=lambda e: (e.start, e.end)):
        if not deletions or deletion.start >= deletions[-1].end:  # else it is within the one before
            deletions.append(deletion)
    # Deletions come first, since their offsets are offsets in the old text: the last one first, for the same reason.
    for deletion in reversed(deletions):
        text = text[: deletion.start] + text[deletion.end :]
    for edit in unique:
        if not isinstance(edit, Deletion):
            text = _apply(document.reread(text), edit)
    return text


def _apply(document: Document, edit: Edit) -> str:
    if isinstance(edit, Assignment):
        return _set(document, edit)
    assert not isinstance(edit, Deletion)
    member = document.member(edit.path)
    text = document.text
    if member is None:
        return text
    if isinstance(edit, Move):
        # Both keys exist, so moving would lose a value. The user has to choose one of them.
        if document.member(edit.to):
            return text
        # After the assignment all positions in the text have changed, so it is parsed again before the removal.
        moved = document.reread(_set(document, Assignment(edit.to, member.value.data)))
        return _apply(moved, Removal(edit.path))
    if isinstance(edit, Renaming):
        return text[: member.place.start] + json.dumps(edit.key) + text[member.place.end :]
    return _without(document, edit.path, member)


def _without(document: Document, path: str, member: ObjectMember) -> str:
    """Return the text without a member, its comma and its line break."""
    parent = path.rpartition(".")[0]
    owner = document.value(parent)
    assert owner  # the object contains the member
    text, start, end = document.text, member.place.start, member.value.place.end
    number = next(i for i, m in enumerate(owner.members) if m is member)
    if number + 1 < len(owner.members):
        after = after_comma(text, end)
        line_start = text.rfind("\n", 0, start) + 1
        line_end = re.match(r"[ \t]*\n", text[after:])
        # A member with its own line: remove the line. Else remove the text up to the next member.
        if line_end and not text[line_start:start].strip():
            return text[:line_start] + text[after + line_end.end() :]
        return text[:start] + text[after + len(_blanks(text[after:])) :]
    if number:
        # The last member: remove the comma of the member before, and keep that one's comments.
        after = after_comma(text, owner.members[number - 1].value.place.end)
        comments = text[after:start].rstrip()
        line_break = "\n" if comments and not re.match(r"[ \t]*\r?\n", text[end:]) else ""
        return text[: after - 1] + comments + line_break + text[end:]
    trailing = TO_COMMA.match(text, end)
    return text[:start] + text[trailing.end() if trailing else end :]


def after_comma(text: str, end: int) -> int:
    """Return the offset after the comma that follows a value and its comments."""
    comma = TO_COMMA.match(text, end)
    assert comma, "every member except the last needs a comma"
    return comma.end()


def _set(document: Document, edit: Assignment) -> str:
    """Return the text with the new value, or with a new member in the innermost object."""
    text, path, value = document.text, edit.path, edit.value
    member = document.member(path)
    if member:
        place = member.value.place
        return text[: place.start] + _dumps(value, _indent_at(text, member.place.start)) + text[place.end :]
    parent, _, key = path.rpartition(".")
    while not ((owner := document.value(parent)) and isinstance(owner.data, dict)) and parent:
        value = {key: value}
        parent, _, key = parent.rpartition(".")
    path = f"{parent}.{key}" if parent else key
    if document.member(path):  # a parent is not an object: replace it
        return _set(document, Assignment(path, value))
    assert owner  # at least the root
    return _insert(text, owner, key, value)


def _insert(text: str, owner: ParsedValue, key: str, value: object) -> str:
    """Return the text with a new member at the end of an object, laid out like the others."""
    if owner.members:
        last = owner.members[-1]
        indent, end = _indent_at(text, last.place.start), last.value.place.end
        multiline = "\n" in text[owner.place.start : last.place.start]
        glue = f",\n{indent}" if multiline else ", "
        return text[:end] + f"{glue}{json.dumps(key)}: {_dumps(value, indent)}" + text[end:]
    outer = _indent_at(text, owner.place.start)
    inner = f"{{\n{outer}  {json.dumps(key)}: {_dumps(value, outer + '  ')}\n{outer}}}"
    return text[: owner.place.start] + inner + text[owner.place.end :]


def _indent_at(text: str, offset: int) -> str:
    return _blanks(text[text.rfind("\n", 0, offset) + 1 :])


def _blanks(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" \t"))]


def _dumps(value: object, indent: str) -> str:
    """Return a value as JSON: in one line, unless it has an object or list in it."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(part, dict | list) for part in parts):
        return json.dumps(value)
    return json.dumps(value, indent=2).replace("\n", f"\n{indent}")
