"""The only reader of users' JSON files. It returns a value, or raises `Unreadable`.

`spec.foreign_yaml` reads YAML.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter  # callers have imported it

MAX_DEPTH = 100  # levels of nesting: real files have at most a dozen, and recursive code reads the value
MAX_DIGITS = 40  # digits of an integer: no size or seed has more, and products fit a float
TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"
TOO_LONG = f"an integer has more than {MAX_DIGITS} digits"
MAX_BYTES = 256 << 20  # the index of a checkpoint with a million tensors has 100 MB

LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
KINDS = {dict: "an object", list: "a list", str: "a string"}
# files of other formats -> how to convert them; transformers 5 no longer has the script for Meta's
CONVERSIONS = {
    "*.gguf": "convert it with transformers and gguf: from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OUT)",
    "params.json": "these are original weights: use the model's version for transformers, or convert them with "
    "`python -m transformers.models.llama.convert_llama_weights_to_hf` of transformers 4",
}

T = TypeVar("T")


class Unreadable(ValueError):
    """Text that cannot be read; `line` and `column` count from 1, or are 0 if unknown."""

    def __init__(self, reason: str, line: int = 0, column: int = 0):
        super().__init__(reason + (f" (line {line}, column {column})" if line else ""))
        self.reason, self.line, self.column = reason, line, column


@contextmanager
def refused(
    path: Path, *, kind: str = "unreadable", hint: str = "", where: str = "", doing: str = "read"
) -> Iterator[None]:
    """Turn OSError and Unreadable into a UserError with the file, the line and the reason.

    `doing`: "read" or "write", for the message.
    """
    try:
        yield
    except Unreadable as error:
        place = f"{path}:{error.line}:{error.column}" if error.line else str(path)
        problem = Problem(kind=kind, message=f"cannot read {place}: {error.reason}", hint=hint, where=where or place)
        raise UserError(problem) from None
    except OSError as error:
        message = f"cannot {doing} {path}: {error.strerror or error}"
        raise UserError(Problem(kind=kind, message=message, hint=hint, where=where or str(path))) from None


def shaped(value: object, form: TypeAdapter[T]) -> T:
    """Validate a parsed value. Raises Unreadable that names the first wrong key."""
    from pydantic import ValidationError

    try:
        return form.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        raise Unreadable(f"{at}: {first['msg']}" if at else first["msg"]) from None


def read_json(path: Path, kind: type[T] = dict, *, most: int = MAX_BYTES) -> T:
    """Return the JSON value of a file of at most `most` bytes. `kind`: dict, list or object.

    Raises OSError, or Unreadable, whose reason does not name the file.
    """
    return of_kind(parse_json(bounded(path, most)), kind)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text in UTF-8, with or without a byte order mark. Raises Unreadable."""
    text = decoded(text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg[0].lower()}{error.msg[1:]}", error.lineno, error.colno) from None
    except RecursionError:
        raise Unreadable(TOO_DEEP) from None
    except ValueError:  # an integer beyond Python's limit of digits
        raise Unreadable(TOO_LONG) from None
    # The standard library's parser accepts values that fail later: recursive code fails for deep nesting, arithmetic
    # for long integers, and printing for a string with half of a surrogate pair. Millions of data rows pass here, so
    # each check is skipped unless the text may fail it.
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise Unreadable(TOO_DEEP)
    if LONG_NUMBER.search(text) and _has_long_number(value):
        raise Unreadable(TOO_LONG)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unreadable("a string has half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def of_kind(value: object, kind: type[T], names: dict[type, str] = KINDS) -> T:
    """Return the value if it is of `kind`, else raise Unreadable."""
    if not isinstance(value, kind):
        got = names.get(type(value), type(value).__name__ if value is not None else "nothing")
        raise Unreadable(f"expected {names.get(kind, kind.__name__)}, got {got}")
    return value


def bounded(path: Path, most: int) -> bytes:
    """Return a file's content. Raises OSError, or Unreadable if it has more than `most` bytes."""
    try:
        with path.open("rb") as file:
            # The size is not from stat: it is 0 for a pipe or a file of /proc, and another host may still be writing
            # the file.
            content = file.read(most + 1)
    except ValueError:  # raised by open for a NUL byte
        raise OSError(errno.EINVAL, "the name has a NUL byte", str(path)) from None
    if len(content) > most:
        raise Unreadable(f"the file is larger than {most >> 20} MiB")
    return content


def decoded(text: str | bytes) -> str:
    """Decode UTF-8 text and drop its byte order mark. Raises Unreadable."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from None


# Without recursion, since the nesting may be deeper than Python's stack
def _nested(value: object) -> Iterator[tuple[object, int]]:
    stack = [(value, 1)]
    while stack:
        value, depth = stack.pop()
        yield value, depth
        if isinstance(value, dict):
            stack += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            stack += [(child, depth + 1) for child in value]


def _too_deep(value: object) -> bool:
    return any(depth > MAX_DEPTH + 1 for _, depth in _nested(value))


def _has_long_number(value: object) -> bool:
    return any(isinstance(inner, int) and abs(inner) >= 10**MAX_DIGITS for inner, _ in _nested(value))
