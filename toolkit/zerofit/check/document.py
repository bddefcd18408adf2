"""A DeepSpeed JSON, or a YAML with its keys, as text: comments tolerated, every key and value with its place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from zerofit.check.scan import ObjectMember, ParsedValue, Scanner, SyntaxFault, TextPosition
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_yaml import YamlTree


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed JSON or YAML: its text, its root and what is tolerated but not strict JSON."""

    text: str
    root: ParsedValue
    generated: bool = False  # the user has never seen the text, its lines say nothing
    encoding: str = "utf-8"  # as Python calls it; utf-8-sig begins with a mark
    commas: tuple[TextPosition, ...] = ()  # after the last member of an object or array
    comment: TextPosition | None = None  # the first one
    places: Mapping[str, TextPosition] | None = None  # in the file, where `text` is another writing of it
    loose: SyntaxFault | None = None  # where JSON ends and HJSON begins
    yaml: bool = False

    @property
    def config(self) -> Any:
        """The plain value, as json.loads gives it."""
        return self.root.data

    @property
    def editable(self) -> bool:
        """Whether edits can be made in place: not in HJSON, nor in YAML that goes by its indentation."""
        return self.places is None and (not self.yaml or self.text[self.root.place.start :].startswith("{"))

    def reread(self, text: str) -> Document:
        """Return a document of another text in the same notation."""
        return parse_yaml(text) if self.yaml else parse(text)

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
    scanner = Scanner(text)
    return Document(text=text, root=scanner.read(), commas=tuple(scanner.commas), comment=scanner.comment)


def parse_yaml(text: str) -> Document:
    """Parse a YAML document whose root is a mapping. Raises SyntaxFault with line and column."""
    try:
        tree = YamlTree(text)
        if not isinstance(tree.root, yaml.MappingNode):
            raise Unreadable("no mapping of keys to values", 1, 1)
        return Document(text=text, root=_of_node(tree, tree.root), yaml=True)
    except Unreadable as error:
        raise SyntaxFault(error.reason, error.line or 1, error.column or 1, notation="YAML") from None


def _of_node(tree: YamlTree, node: yaml.Node) -> ParsedValue:
    """Return a node with its parts; keys are strings, and so is what JSON has no word for (a date, infinity)."""
    place = _position(node)
    if isinstance(node, yaml.MappingNode):
        members = tuple(
            ObjectMember(key=str(tree.value(key)), place=_position(key), value=_of_node(tree, value))
            for key, value in tree.members(node)
        )
        return ParsedValue(place=place, data={m.key: m.value.data for m in members}, members=members)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_of_node(tree, item) for item in node.value)
        return ParsedValue(place=place, data=[item.data for item in items], items=items)
    data = tree.value(node)
    plain = data is None or isinstance(data, str | int) or (isinstance(data, float) and math.isfinite(data))
    return ParsedValue(place=place, data=data if plain else node.value)


def _position(node: yaml.Node) -> TextPosition:
    start, end = node.start_mark, node.end_mark
    return TextPosition(line=start.line + 1, column=start.column + 1, start=start.index, end=end.index)


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
