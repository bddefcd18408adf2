"""The text of a DeepSpeed JSON or YAML, with the position of every key and value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from zerofit.check.dotted import with_parents
from zerofit.check.scan import ObjectMember, ParsedValue, Scanner, SyntaxFault, TextPosition
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_yaml import YamlTree


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed JSON or YAML: its text, its root, and the places where it is not strict JSON."""

    text: str
    root: ParsedValue
    generated: bool = False  # the user did not write this text: line numbers are meaningless
    encoding: str = "utf-8"  # Python's name; utf-8-sig begins with a byte order mark
    commas: tuple[TextPosition, ...] = ()  # after the last member of an object or array
    comment: TextPosition | None = None  # the first comment
    places: Mapping[str, TextPosition] | None = None  # place in the file, if `text` is not the file's own text
    hjson: SyntaxFault | None = None  # the first place that is HJSON, not JSON
    yaml: bool = False

    @property
    def config(self) -> Any:
        """The value, as json.loads returns it."""
        return self.root.data

    @property
    def editable(self) -> bool:
        """Whether the text can be edited in place. HJSON, and YAML without braces, cannot be edited."""
        return self.places is None and (not self.yaml or self.text[self.root.place.start :].startswith("{"))

    def reread(self, text: str) -> Document:
        """Parse another text in the same notation."""
        return parse_yaml(text) if self.yaml else parse(text)

    def member(self, path: str) -> ObjectMember | None:
        """Return the member at a dotted path, or None. Of duplicate keys, the last counts."""
        member = None
        value = self.root
        for key in path.split("."):
            member = value.by_key.get(key)
            if member is None:
                return None
            value = member.value
        return member

    def value(self, path: str) -> ParsedValue | None:
        """Return the value at a dotted path ("" is the root), or None."""
        member = self.member(path)
        return self.root if not path else member and member.value

    def place(self, path: str) -> TextPosition:
        """Return the position of a key; of a missing key, that of its innermost existing parent."""
        while path:
            member = self.member(path)
            if self.places is not None and path in self.places:
                return self.places[path]
            if member and self.places is None:
                return member.place
            path = path.rpartition(".")[0]
        return self.root.place

    def duplicates(self) -> Iterator[tuple[str, ObjectMember, ObjectMember]]:
        """Yield each duplicate key: its dotted path, an earlier member, the last member."""
        yield from _duplicates(self.root, "")


def _duplicates(value: ParsedValue, prefix: str) -> Iterator[tuple[str, ObjectMember, ObjectMember]]:
    # Readers that accept duplicate keys use the last one.
    last = {m.key: m for m in value.members}
    for member in value.members:
        path = f"{prefix}{member.key}"
        if member is not last[member.key]:
            yield path, member, last[member.key]
        yield from _duplicates(member.value, f"{path}.")
    for item in value.items:
        yield from _duplicates(item, f"{prefix}[].")


def parse(text: str) -> Document:
    """Parse a JSON. Raises SyntaxFault with line, column, and what the parser expected there."""
    scanner = Scanner(text)
    return Document(text=text, root=scanner.read(), commas=tuple(scanner.commas), comment=scanner.comment)


def parse_yaml(text: str) -> Document:
    """Parse a YAML whose root is a mapping. Raises SyntaxFault with line and column."""
    try:
        tree = YamlTree(text)
        if not isinstance(tree.root, yaml.MappingNode):
            raise Unreadable("no mapping of keys to values", 1, 1)
        return Document(text=text, root=_of_node(tree, tree.root), yaml=True)
    except Unreadable as error:
        raise SyntaxFault(error.reason, error.line or 1, error.column or 1, notation="YAML") from None


def _of_node(tree: YamlTree, node: yaml.Node) -> ParsedValue:
    """Convert a YAML node and the nodes in it to a `ParsedValue`."""
    place = _position(node)
    if isinstance(node, yaml.MappingNode):
        # JSON has only strings as keys. Keys merged by << come first, so the mapping's own keys replace them.
        last = {str(tree.value(key)): (key, value) for key, value in tree.members(node)}
        members = tuple(
            ObjectMember(key=name, place=_position(key), value=_of_node(tree, value))
            for name, (key, value) in last.items()
        )
        return ParsedValue(place=place, data={m.key: m.value.data for m in members}, members=members)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_of_node(tree, item) for item in node.value)
        return ParsedValue(place=place, data=[item.data for item in items], items=items)
    # JSON has no dates and no infinity: such values stay text.
    data = tree.value(node)
    supported = data is None or isinstance(data, str | int) or (isinstance(data, float) and math.isfinite(data))
    return ParsedValue(place=place, data=data if supported else node.value)


def _position(node: yaml.Node) -> TextPosition:
    start, end = node.start_mark, node.end_mark
    return TextPosition(line=start.line + 1, column=start.column + 1, start=start.index, end=end.index)


def of_hjson(text: str, config: object, fault: SyntaxFault) -> Document:
    """Return the document of an HJSON text. Its keys are located by a search in the text."""
    return replace(of_data(config), generated=False, places=dict(_places(config, text, "", 0)), hjson=fault)


def _places(config: object, text: str, prefix: str, after: int) -> Iterator[tuple[str, TextPosition]]:
    """Yield the position of each key: the first match after its parent's key."""
    for key, value in config.items() if isinstance(config, dict) else ():
        # The text before may contain the key in a string or a comment. Then a finding has a wrong line, but the right
        # key.
        found = re.compile(rf"(?<!\w){re.escape(key)}(?!\w)[\"']?\s*:").search(text, after)
        start = found.start() if found else after
        line = text.count("\n", 0, start) + 1
        column = start - text.rfind("\n", 0, start)
        yield f"{prefix}{key}", TextPosition(line=line, column=column, start=start, end=start + len(key))
        yield from _places(value, text, f"{prefix}{key}.", start)


def of_data(config: object) -> Document:
    """Return a document for a value without a file of its own, such as `ds_config` in run.yaml."""
    return replace(parse(json.dumps(config, indent=2)), generated=True)


def of_lines(config: object, lines: Mapping[str, int]) -> Document:
    """Return a document for a value made from another file, with the line numbers of that file."""
    places: dict[str, TextPosition] = {}
    for path, line in sorted(lines.items(), key=lambda item: item[1]):
        # A section has the line of its first key.
        for name in with_parents(path):
            places.setdefault(name, TextPosition(line=line, column=1, start=0, end=0))
    return replace(of_data(config), places=places)
