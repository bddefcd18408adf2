"""The only reader of users' YAML files. Like `spec.foreign`, it may raise `Unreadable`.

It is a separate module because importing PyYAML takes 0.1 s, and most commands do not need it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.foreign import (
    KINDS,
    LONG_NUMBER,
    MAX_DEPTH,
    TOO_DEEP,
    TOO_LONG,
    Unreadable,
    bounded,
    decoded,
    of_kind,
    parse_json,
    refused,
)

MAX_YAML_BYTES = 8 << 20  # PyYAML reads about 0.1 MB a second
MAX_NODES = 1_000_000  # values of a YAML document; a value that an alias repeats counts each time
_YAML_KINDS = KINDS | {dict: "a mapping"}

T = TypeVar("T")


def read_yaml(path: Path, kind: type[T] = dict) -> tuple[T, dict[Hashable, int]]:
    """Return the value of a YAML file, which must be of `kind`, and each top-level key's line.

    Raises OSError, or Unreadable, whose reason does not name the file. Duplicate keys are an error.
    """
    value, lines = parse_yaml(bounded(path, MAX_YAML_BYTES))
    return of_kind(value, kind, _YAML_KINDS), lines


def read_own_yaml(path: Path) -> tuple[dict[Hashable, object], dict[Hashable, int], list[Unreadable]]:
    """Return the mapping in a YAML or JSON file of zerofit, each key's line, and all faults.

    Numbers follow YAML 1.2 and JSON: 1e-4 is a number, 1:30 and 2026-11-27 are text. Faults are duplicate keys and
    ambiguous numbers (010 is 8 for some readers and 10 for others). Raises OSError, or Unreadable like `read_yaml`.
    """
    text, faults = decoded(bounded(path, MAX_YAML_BYTES)), dict[tuple[int, int], Unreadable]()
    if path.suffix != ".json":
        value, lines = YamlTree(text, _OwnLoader, faults).contents()
        return of_kind(value, dict, _YAML_KINDS), lines, list(faults.values())
    value, lines = of_kind(parse_json(text), dict), {}
    with suppress(Unreadable):  # only for the lines: YAML forbids tabs and surrogate pairs, which JSON allows
        lines = YamlTree(text.replace("\t", " "), _OwnLoader, faults).contents()[1]
    return value, lines, list(faults.values())


def read_own_values(path: Path, *, kind: str = "unreadable", hint: str = "", where: str = "") -> dict[Any, Any]:
    """Return the mapping in a file of zerofit. Raises UserError with all faults and their lines."""
    with refused(path, kind=kind, hint=hint, where=where):
        found, _, faults = read_own_yaml(path)
    if faults:
        raise UserError(*(Problem(kind=kind, message=f"{path}: {fault}", hint=hint, where=where) for fault in faults))
    return found


class _OwnLoader(yaml.SafeLoader):
    """PyYAML's loader, but numbers follow YAML 1.2 and may have underscores, and dates are text."""


# PyYAML's own patterns follow YAML 1.1: 1e-4 without a dot is a text, 1:30 is 90, and 0777 is octal.
_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
}
_OTHER_RADIX = re.compile(r"[-+]?0[ob]?[0-9][0-9_]*")  # 010, 0o10 and 0b10 are different numbers for different readers
_OwnLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in (*_NUMBERS, "timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    _OwnLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), list("-+.0123456789")
    )


def parse_yaml(text: str | bytes) -> tuple[object, dict[Hashable, int]]:
    """Return the value of one YAML document, and each top-level key's line. Raises Unreadable."""
    return YamlTree(text).contents()


class YamlTree:
    """The nodes of one YAML document with their marks. Raises Unreadable.

    If `faults` is given, faults of single values are added to `faults` by line and column instead of raised. For an
    empty text, `root` is None.
    """

    def __init__(
        self,
        text: str | bytes,
        loader: type[yaml.SafeLoader] = yaml.SafeLoader,
        faults: dict[tuple[int, int], Unreadable] | None = None,
    ):
        with _refusals():
            # libyaml would be faster, but deep nesting overflows its stack
            self._loader = loader(decoded(text))
            self.root: yaml.Node | None = self._loader.get_single_node()
        if self.root is not None:
            _check_nodes(self.root, faults)
        self._current: yaml.Node | None = None
        construct = self._loader.construct_object

        def construct_object(node: yaml.Node, deep: bool = False) -> object:
            self._current = node  # for the place of an error in `!!int abc` or `2026-99-99`
            return construct(node, deep)

        self._loader.construct_object = construct_object

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node. Raises Unreadable if a scalar does not match its tag."""
        try:
            with _refusals():
                return self._loader.construct_document(node)
        except (ValueError, OverflowError, KeyError, IndexError, AttributeError, TypeError) as error:
            if isinstance(error, Unreadable):
                raise
            # PyYAML's constructors raise plain Python errors, without a place. `_current` is the node that they were
            # reading.
            at = self._current or node
            shown = f"{at.value[:40]!r}" if isinstance(at, yaml.ScalarNode) else "this"
            kind = at.tag.rpartition(":")[2]
            article = "an" if kind[:1] in "aeiou" else "a"
            mark = at.start_mark
            raise Unreadable(f"{shown} is not {article} {kind}: {error}", mark.line + 1, mark.column + 1) from None

    def contents(self) -> tuple[object, dict[Hashable, int]]:
        """Return the value of the document, and the line of each top-level key."""
        if self.root is None:
            return None, {}
        value = self.value(self.root)
        if isinstance(value, dict) and isinstance(self.root, yaml.MappingNode):
            return value, {self.value(key): key.start_mark.line + 1 for key, _ in self.root.value}
        return value, {}

    def members(self, mapping: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return keys and values of a mapping, including merged keys (`<<`)."""
        with _refusals():
            self._loader.flatten_mapping(mapping)
        return mapping.value


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(
            str(error.problem or error.context), *((mark.line + 1, mark.column + 1) if mark else ())
        ) from None
    except yaml.YAMLError as error:  # characters that YAML forbids
        raise Unreadable("; ".join(line.strip() for line in str(error).splitlines())) from None
    except RecursionError:
        raise Unreadable(TOO_DEEP) from None


def _check_nodes(document: yaml.Node, faults: dict[tuple[int, int], Unreadable] | None) -> None:
    """Refuse deep nesting, too many values, duplicate keys and long numbers.

    If `faults` is given, duplicate keys and ambiguous numbers are added to it by their place, and not raised.
    """
    counted = 0  # with the values that aliases repeat: aliases of aliases multiply, and may contain themselves
    stack = [(document, 1)]
    while stack:
        node, depth = stack.pop()
        counted += 1
        mark = node.start_mark
        place = mark.line + 1, mark.column + 1
        if depth > MAX_DEPTH:
            raise Unreadable(TOO_DEEP, *place)
        if counted > MAX_NODES:
            raise Unreadable(f"the document has more than {MAX_NODES:,} values, including aliases", *place)
        if isinstance(node, yaml.ScalarNode):
            if LONG_NUMBER.search(node.value) and node.tag == "tag:yaml.org,2002:int":
                raise Unreadable(TOO_LONG, *place)
            plain = node.style is None or node.tag.endswith(":int")
            if faults is not None and plain and _OTHER_RADIX.fullmatch(node.value):
                reason = f"{node.value} is ambiguous: YAML readers disagree on its value"
                faults[place] = Unreadable(f"{reason}; write decimal digits without leading zeros, or quote it", *place)
            continue
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
            repeated = {(fault.line, fault.column): fault for fault in _repeated(node)}
            if repeated and faults is None:
                raise next(iter(repeated.values()))
            if faults is not None:
                faults.update(repeated)
        stack += [(child, depth + 1) for child in children]


def _repeated(mapping: yaml.MappingNode) -> Iterator[Unreadable]:
    seen: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        if (key.tag, key.value) in seen:
            first = seen[key.tag, key.value]
            yield Unreadable(f"duplicate key {key.value!r}, first on line {first}", line, column)
        seen.setdefault((key.tag, key.value), line)
