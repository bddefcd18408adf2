"""JSON lines files that one process appends to while others read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class JsonlTail:
    """The objects of a growing JSON lines file, each of them once.

    A line that does not parse (a network file system can show NULs where another host writes, a disk can fill up
    within a character) is skipped; `on_bad_line` hears of the first one. A line without an end is read later.
    """

    def __init__(
        self, path: Path, *, from_start: bool = False, on_bad_line: Callable[[str], None] = lambda text: None
    ) -> None:
        self._path, self._on_bad_line, self._bad = path, on_bad_line, 0
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were added since the last call, or since this tail was made."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return  # not there yet, or its file system is away for a moment
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            else:
                self._skip(line)

    def _skip(self, line: bytes) -> None:
        self._bad += 1
        if self._bad == 1:
            start = self._offset - len(line)
            self._on_bad_line(f"{self._path} holds a line that is not a JSON object (at byte {start}); it is skipped")
