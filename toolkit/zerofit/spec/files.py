"""Files and plain data: atomic writes, JSON lines, the cache folder, results as JSON."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO

from zerofit.spec.errors import Problems
from zerofit.spec.foreign import Unreadable, parse_json


def stays_inside(name: str) -> bool:
    """Return whether `name`, a relative path that a file contains, stays within its base folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and name.isprintable()


# A reader sees either the old file or the new file, never a part. A power failure leaves one of these two. To ensure
# this, we write a temporary file in the same folder, flush it to the disk, rename it over the old one, flush the
# folder.


@contextmanager
def atomic_write(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    The permissions are `mode`, else the permissions of the replaced file, else the default of the umask. File and
    folder are flushed to disk. Raises OSError that names `path`.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe must not be replaced
        with path.open("wb") as file:
            yield file
        return
    # A link stays, and its target is replaced. /dev/stdout is a link, too, if a shell redirects the output to a file.
    given, path = path, Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # other hosts may write here too
    try:
        if mode is None and path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
        # With a `mode`, the file may contain a secret, so nobody else may read it even for a moment. The umask changes
        # the mode of os.open, but not that of fchmod.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # it may not exist, for example if the folder cannot be written
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(given)
        raise


def refuse_target(path: str | Path | None, option: str, endings: Sequence[str] = ()) -> None:
    """Raise a UserError before any work if no file can be written to `path`, the value of `option`.

    `endings`: the suffixes that the name may have. None is always fine.
    """
    if path is None:
        return
    path, problems = Path(path), Problems()
    if endings and path.suffix.lower() not in endings:
        hint = f"use a name that ends in {' or '.join(endings)}"
        problems.add("bad-value", f"{path} is not the name of a {endings[0]} file", hint, option)
    if path.is_dir() or not path.absolute().parent.is_dir():
        problems.add("bad-value", f"{path} cannot be written", "use a file in an existing folder", option)
    problems.raise_if_any()


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_write(path, mode=mode) as file:
        file.write(text.encode())


def write_json(path: Path, value: object, *, mode: int | None = None) -> None:
    """Write indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", mode=mode)


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, if its file system supports that."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # it does not
            raise


def cache_root() -> Path:
    """Return the cache folder: $ZEROFIT_CACHE, else ~/.cache/zerofit."""
    chosen = os.environ.get("ZEROFIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "zerofit"


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """Return the objects of a JSON lines file without other lines. Raises OSError."""
    # a kill may have cut a line
    return [value for line in path.read_bytes().split(b"\n") if (value := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, object] | None:
    """Return the object of a JSON line, or None for anything else."""
    try:
        value = parse_json(line)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None


def packaged_yaml(text: str) -> Any:
    """Return the content of a YAML file that zerofit itself has written."""
    import yaml  # takes 0.1 s; most commands need no YAML

    # libyaml is ten times as fast, and PyYAML without libyaml gives the same result
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def number_in(record: Mapping[str, object], key: str) -> float | None:
    """Return the value of a record's numeric field; None if it has no number there."""
    value = record.get(key)
    return value if isinstance(value, int | float) else None


def open_jsonl(path: Path) -> TextIO:
    """Open a JSON lines file for appending, flushed after each line."""
    with path.open("a+b") as file:
        if file.tell():  # a kill may have cut the last line
            # In mode "a", every write goes to the end of the file, wherever the last read was.
            file.seek(-1, os.SEEK_END)
            file.write(b"\n" * (file.read(1) != b"\n"))
    return path.open("a", buffering=1, encoding="utf-8")


class JsonlTail:
    """Reader of a growing JSON lines file that yields each added object once.

    A line that cannot be parsed is skipped, and `on_bad_line` is called for the first such line.
    """

    def __init__(self, path: Path, *, on_bad_line: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._on_bad_line, self._reported = path, on_bad_line, False
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> Iterator[dict[str, object]]:
        """Yield the objects added since the last call, or since the tail was created."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.readlines()
        except OSError:
            return  # not created yet, or the file system is temporarily unavailable
        for line in lines:
            if not line.endswith(b"\n"):  # it is still being written
                return
            self._offset += len(line)
            value = parse_line(line)
            if value is not None:
                yield value
            elif line.strip() and not self._reported:
                # network file systems can show NULs while another host writes, and a full disk can cut a character
                self._reported, start = True, self._offset - len(line)
                self._on_bad_line(f"{self._path} has a line that is not a JSON object (at byte {start}); it is skipped")


def plain_data(value: Any) -> Any:
    """Convert dataclasses (by `to_dict` if they have it), tuples and paths to JSON types."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return field_data(value)
    if isinstance(value, dict):
        return {key: plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def field_data(value: Any, *left_out: str) -> dict[str, object]:
    """Convert a dataclass to a dictionary of plain data, without the fields `left_out`."""
    return {f.name: plain_data(getattr(value, f.name)) for f in fields(value) if f.name not in left_out}
