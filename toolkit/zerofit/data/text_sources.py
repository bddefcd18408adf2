"""Sources of text by name: Python's own library, files, lines of JSON."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerofit.data.documents import (
    NAMED,
    FileSource,
    Source,
    Survey,
    TextPiece,
    files_fingerprint,
    hash_files,
    held_out_hash,
    split_text,
)
from zerofit.data.hf import open_hf
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
)


def open_pysource(run: Run, argument: str) -> Source:
    """The Python files of the running interpreter's standard library, ordered by relative path.

    Without installed packages, tests, idlelib and lib2to3. 5 % of the files, by hash of the path, are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple((name, root / name) for name in sorted(_library_files(root)))
    if not files:
        message = f"--data pysource: {root} holds no Python source (a stripped interpreter?)"
        raise UserError(Problem(kind="empty-data", message=message, hint="--data text:GLOB", where="--data"))
    return FileSource(name="pysource", files=files, errors="replace")


def _library_files(root: Path) -> Iterator[str]:
    """Relative paths of Python files; installed packages, often far more than the library, are not walked through."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py"))


def open_text(run: Run, argument: str) -> Source:
    """One document a file, UTF-8, ordered by path.

    With 20 files or more, 5 % of them (by hash of the path below the glob's fixed folder) are held out; with fewer,
    the last 5 % of the bytes of each, cut at a line's end. Raises UserError "empty-data" when nothing matches.
    """
    return FileSource(name=f"text:{argument}", files=_matches("text", argument))


def open_jsonl(run: Run, argument: str) -> Source:
    """One document a line, the field `run.text_field` of a JSON object; blank lines do not count.

    With 20 documents or more, 5 % of them (by hash of file and line number) are held out; with fewer, the last 5 %
    of each. Raises UserError "empty-data" when nothing matches.
    """
    return JsonlSource(name=f"jsonl:{argument}", files=_matches("jsonl", argument), field=run.text_field)


def _matches(kind: str, pattern: str) -> tuple[tuple[str, Path], ...]:
    """(path relative to the fixed part of the pattern, path): a moved folder keeps its split and its cache."""
    full = str(Path(pattern).expanduser())
    found = sorted(Path(p).absolute() for p in glob.glob(full, recursive=True) if Path(p).is_file())
    if not found:
        message = f"--data {kind}:{pattern} matches no file"
        folder = Path(full).is_dir()
        hint = f"a folder needs a pattern: {kind}:{pattern.rstrip('/')}/*" if folder else "check the path; quote the *"
        raise UserError(Problem(kind="empty-data", message=message, hint=hint, where="--data"))
    root = Path(glob.escape(full) if Path(full).is_file() else full).absolute()
    while glob.has_magic(str(root)) or root.is_file():
        root = root.parent
    return tuple((path.relative_to(root).as_posix(), path) for path in found)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """One document a line of JSON."""

    name: str
    files: tuple[tuple[str, Path], ...]
    field: str

    def fingerprint(self) -> str:
        """Names, sizes and times of change."""
        return files_fingerprint(self.files) + self.field

    def survey(self, progress: Reporter) -> Survey:
        """Lines that are not blank are documents."""
        digest = hash_files(self.name, self.files, progress) + self.field
        return Survey(digest, sum(1 for _ in self._lines()))

    def size_bytes(self) -> int:
        """The sum of the files' sizes."""
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """See Source.pieces; up to 20 bad lines are named file:line:column."""
        limit = held_out_hash((f"{name}:{number}" for name, _, number, _ in self._lines()), documents)
        problems: list[Problem] = []
        for name, path, number, line in self._lines():
            text = _text_of(path, number, line, self.field)
            if isinstance(text, str):
                yield from split_text(f"{name}:{number}", text, limit)
                continue
            problems.append(text)
            if len(problems) >= NAMED:
                break
        if problems:
            raise UserError(*problems)

    def _lines(self) -> Iterator[tuple[str, Path, int, bytes]]:
        for name, path in self.files:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield name, path, number, line


def _text_of(path: Path, number: int, line: bytes, field: str) -> str | Problem:
    """The text of one line, or what is wrong with it."""

    def bad(column: int, message: str, hint: str) -> Problem:
        where = f"{path}:{number}:{column}"
        return Problem(kind="bad-jsonl", message=f"{where}: {message}", hint=hint, where=where)

    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return bad(error.start + 1, f"byte 0x{line[error.start]:02x} is not UTF-8", "iconv -t utf-8 converts it")
    except json.JSONDecodeError as error:
        return bad(error.colno, f"not JSON: {error.msg}", "each line is one JSON object")
    if not isinstance(row, dict):
        return bad(1, f"got a JSON {type(row).__name__}, need an object", f'{{"{field}": "..."}}')
    if field not in row:
        return bad(
            1, f"no field {field!r}; there is {', '.join(row) or 'none'}", f"--text-field: {nearest(field, row)}"
        )
    if not isinstance(row[field], str):
        return bad(1, f"field {field!r} is {type(row[field]).__name__}, need a string", "--text-field names another")
    # JSON can spell half of a surrogate pair, which is no character and has no bytes.
    return row[field].encode("utf-8", "replace").decode()


TEXT_SOURCES: dict[str, Callable[[Run, str], Source]] = {
    "pysource": open_pysource,
    "text": open_text,
    "jsonl": open_jsonl,
    "hf": open_hf,
}
