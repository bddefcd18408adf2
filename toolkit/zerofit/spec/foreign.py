"""The one reader of JSON and the one of YAML: whatever somebody's file contains, it ends in a value or in `Unreadable`.

The parsers of the standard library and of PyYAML end in a dozen ways: RecursionError for deep nesting, ValueError
for an integer of 4,301 digits or for the date 2026-99-99, a string with half a surrogate pair that fails once it is
printed, gigabytes for nested YAML aliases. Here they are one error that names the fault and its place.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter  # whoever gives one has imported it

MAX_DEPTH = 100  # levels of nesting: real files have at most a dozen, and code that walks a value recurses
MAX_DIGITS = 40  # digits of an integer: no size or seed has more, and products of these fit a float
MAX_BYTES = 256 << 20  # the index of a checkpoint with a million tensors has 100 MB
MAX_YAML_BYTES = 8 << 20  # PyYAML reads about 0.1 MB a second
MAX_NODES = 1_000_000  # values of a YAML document, counted as often as aliases repeat them

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {dict: "an object", list: "a list", str: "a string"}
_YAML_KINDS = _KINDS | {dict: "a mapping"}

T = TypeVar("T")


class Unreadable(ValueError):
    """Text that is not what it should be; `line` and `column` count from 1, and are 0 where no place is known."""

    def __init__(self, reason: str, line: int = 0, column: int = 0):
        super().__init__(reason + (f" (line {line}, column {column})" if line else ""))
        self.reason, self.line, self.column = reason, line, column


@contextmanager
def refused(path: Path, *, kind: str = "unreadable", hint: str = "", where: str = "") -> Iterator[None]:
    """Turn what reading a file raises (OSError, Unreadable) into a UserError that names the file, its line and why."""
    try:
        yield
    except Unreadable as error:
        place = f"{path}:{error.line}:{error.column}" if error.line else str(path)
        problem = Problem(kind=kind, message=f"cannot read {place}: {error.reason}", hint=hint, where=where or place)
        raise UserError(problem) from None
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise UserError(Problem(kind=kind, message=message, hint=hint, where=where or str(path))) from None


def shaped(value: Any, form: TypeAdapter[T], *, strict: bool | None = None) -> T:
    """Return a parsed value in its form. Raises Unreadable that names the first key at fault."""
    from pydantic import ValidationError

    try:
        return form.validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        raise Unreadable(f"{at}: {first['msg']}" if at else first["msg"]) from None


def read_json(path: Path, kind: type[T] = dict, *, most: int = MAX_BYTES) -> T:
    """Return the JSON value of a file of `most` bytes, which is of `kind` (dict, list or object for any).

    Raises OSError, and Unreadable whose reason does not name the file.
    """
    return _of_kind(parse_json(_bounded(path, most)), kind)


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text in UTF-8, with or without a byte order mark. Raises Unreadable."""
    text = _decoded(text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg[0].lower()}{error.msg[1:]}", error.lineno, error.colno) from None
    except RecursionError:
        raise Unreadable(f"values are nested more than {MAX_DEPTH} deep") from None
    except ValueError:  # json.loads raises nothing else: an integer past Python's own limit of digits
        raise Unreadable(_digits()) from None
    # Each check costs nothing unless the text has what could fail it: millions of data rows pass here.
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise Unreadable(f"values are nested more than {MAX_DEPTH} deep")
    if _LONG_NUMBER.search(text) and _has_long_number(value):
        raise Unreadable(_digits())
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unreadable("a string has half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def read_yaml(path: Path, kind: type[T] = dict) -> tuple[T, dict[Hashable, int]]:
    """Return the value of a YAML file, which is of `kind`, and the line of each key at its top level.

    Raises OSError, and Unreadable whose reason does not name the file. A key that is given twice is an error.
    """
    value, lines = parse_yaml(_bounded(path, MAX_YAML_BYTES))
    return _of_kind(value, kind, _YAML_KINDS), lines


def read_own_yaml(path: Path) -> tuple[dict[Hashable, Any], dict[Hashable, int], list[Unreadable]]:
    """Return the mapping of a YAML or JSON file of zerofit's own, the lines of its keys, and all faults of its values.

    Numbers are those of YAML 1.2 and JSON: 1e-4 is one, 1:30 and 2026-11-27 are text. Faults are keys that are given
    twice, and 010, which is 8 to some readers and 10 to others. Raises OSError, and Unreadable as `read_yaml` does.
    """
    text, faults = _decoded(_bounded(path, MAX_YAML_BYTES)), dict[tuple[int, int], Unreadable]()
    if path.suffix != ".json":
        value, lines = YamlTree(text, _OwnLoader, faults).contents()
        return _of_kind(value, dict, _YAML_KINDS), lines, list(faults.values())
    value, lines = _of_kind(parse_json(text), dict), {}
    with suppress(Unreadable):  # YAML has no tabs between values and halves "\ud83d\ude00": it gives the lines alone
        lines = YamlTree(text.replace("\t", " "), _OwnLoader, faults).contents()[1]
    return value, lines, list(faults.values())


def read_own_values(path: Path, *, kind: str = "unreadable", hint: str = "", where: str = "") -> dict[Any, Any]:
    """Return the mapping of a file as `read_own_yaml` reads it. Raises UserError with all faults and their lines."""
    with refused(path, kind=kind, hint=hint, where=where):
        found, _, faults = read_own_yaml(path)
    if faults:
        raise UserError(*(Problem(kind=kind, message=f"{path}: {one}", hint=hint, where=where) for one in faults))
    return found


class _OwnLoader(yaml.SafeLoader):
    """PyYAML's reader of YAML 1.1, with the numbers of YAML 1.2 (and 1_000), and without dates."""


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
}
_OTHER_RADIX = re.compile(r"[-+]?0[ob]?[0-9][0-9_]*")  # 010, 0o10 and 0b10, of which readers make different numbers
_OwnLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in (*_NUMBERS, "timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    _OwnLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), list("-+.0123456789")
    )


def parse_yaml(text: str | bytes) -> tuple[Any, dict[Hashable, int]]:
    """Return the value of one YAML document as PyYAML's safe loader reads it, and the line of each top-level key.

    Raises Unreadable.
    """
    return YamlTree(text).contents()


class YamlTree:
    """The nodes of one YAML document with their marks; `root` is None where the text is empty. Raises Unreadable.

    `faults`, where it is given, gets what else would be raised of single values, by line and column.
    """

    def __init__(
        self,
        text: str | bytes,
        loader: type[yaml.SafeLoader] = yaml.SafeLoader,
        faults: dict[tuple[int, int], Unreadable] | None = None,
    ):
        with _refusals():
            # C's parser would be faster, but dies of deep nesting (a stack overflow of libyaml's composer)
            self._loader = loader(_decoded(text))
            self.root: yaml.Node | None = self._loader.get_single_node()
        if self.root is not None:
            _check_nodes(self.root, faults)
        self._at: yaml.Node | None = None
        construct = self._loader.construct_object

        def noting(node: yaml.Node, deep: bool = False) -> Any:
            self._at = node  # the place of `!!int abc` or `2026-99-99`
            return construct(node, deep)

        self._loader.construct_object = noting

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node; a scalar that its own tag cannot read is Unreadable at its place."""
        try:
            with _refusals():
                return self._loader.construct_document(node)
        except (ValueError, OverflowError, KeyError, IndexError, AttributeError, TypeError) as error:
            if isinstance(error, Unreadable):
                raise
            at = self._at or node
            shown = f"{at.value[:40]!r}" if isinstance(at, yaml.ScalarNode) else "this"
            kind = at.tag.rpartition(":")[2]
            article = "an" if kind[:1] in "aeiou" else "a"
            mark = at.start_mark
            raise Unreadable(f"{shown} is not {article} {kind}: {error}", mark.line + 1, mark.column + 1) from None

    def contents(self) -> tuple[Any, dict[Hashable, int]]:
        """Return the value of the document, and the line of each key at its top level."""
        if self.root is None:
            return None, {}
        value = self.value(self.root)
        if isinstance(value, dict) and isinstance(self.root, yaml.MappingNode):
            return value, {self.value(key): key.start_mark.line + 1 for key, _ in self.root.value}
        return value, {}

    def members(self, mapping: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return keys and values of a mapping, those that it merges (`<<`) included."""
        with _refusals():
            self._loader.flatten_mapping(mapping)
        return mapping.value


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what PyYAML raises into Unreadable."""
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
        raise Unreadable(f"values are nested more than {MAX_DEPTH} deep") from None


def _check_nodes(document: yaml.Node, faults: dict[tuple[int, int], Unreadable] | None) -> None:
    """Refuse nesting, aliases that multiply or contain themselves, keys that are given twice, and long numbers.

    With `faults`, keys that are given twice and ambiguous numbers are noted there, by their place.
    """
    counted = 0
    stack = [(document, 1)]
    while stack:
        node, depth = stack.pop()
        counted += 1
        mark = node.start_mark
        place = mark.line + 1, mark.column + 1
        if depth > MAX_DEPTH:
            raise Unreadable(f"values are nested more than {MAX_DEPTH} deep", *place)
        if counted > MAX_NODES:
            raise Unreadable(f"the document has more than {MAX_NODES:,} values, aliases counted", *place)
        if isinstance(node, yaml.ScalarNode):
            if _LONG_NUMBER.search(node.value) and node.tag == "tag:yaml.org,2002:int":
                raise Unreadable(_digits(), *place)
            plain = node.style is None or node.tag.endswith(":int")
            if faults is not None and plain and _OTHER_RADIX.fullmatch(node.value):
                reason = f"{node.value} is read as different numbers by different readers of YAML"
                faults[place] = Unreadable(f"{reason}: write decimal digits without leading zeros, or quote it", *place)
            continue
        if isinstance(node, yaml.MappingNode):
            repeated = {(fault.line, fault.column): fault for fault in _repeated(node)}
            if repeated and faults is None:
                raise next(iter(repeated.values()))
            if faults is not None:
                faults.update(repeated)
        stack += [(child, depth + 1) for child in _children(node)]


def _children(node: Any) -> Iterator[yaml.Node]:
    for child in node.value:
        yield from child if isinstance(child, tuple) else (child,)


def _repeated(mapping: yaml.MappingNode) -> Iterator[Unreadable]:
    seen: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        if (key.tag, key.value) in seen:
            first = seen[key.tag, key.value]
            yield Unreadable(f"{key.value!r} is given twice, first in line {first}", line, column)
        seen.setdefault((key.tag, key.value), line)


def _of_kind(value: Any, kind: type[T], names: dict[type, str] = _KINDS) -> T:
    if not isinstance(value, kind):
        got = names.get(type(value), type(value).__name__ if value is not None else "nothing")
        raise Unreadable(f"{names.get(kind, kind.__name__)} is expected, not {got}")
    return value


def _bounded(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except ValueError:  # open's own of a NUL byte
        raise OSError(errno.EINVAL, "its name has a NUL byte", str(path)) from None
    if len(content) > most:
        raise Unreadable(f"the file is larger than {most >> 20} MiB")
    return content


def _decoded(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from None


def _digits() -> str:
    return f"an integer has more than {MAX_DIGITS} digits"


def _nested(value: Any) -> Iterator[tuple[Any, int]]:
    stack = [(value, 1)]
    while stack:
        value, depth = stack.pop()
        yield value, depth
        if isinstance(value, dict):
            stack += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            stack += [(child, depth + 1) for child in value]


def _too_deep(value: Any) -> bool:
    return any(depth > MAX_DEPTH + 1 for _, depth in _nested(value))


def _has_long_number(value: Any) -> bool:
    return any(isinstance(one, int) and abs(one) >= 10**MAX_DIGITS for one, _ in _nested(value))
