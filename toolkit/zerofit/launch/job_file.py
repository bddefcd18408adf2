"""Files for a scheduler: checks of user text, and writing without overwriting."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerofit.spec.errors import Problem, Problems, UserError

LONGEST = 1000  # characters of one line
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # names of environment variables (POSIX, 8.1)


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """The content of a file for any scheduler. All values are data: no shell expands them."""

    name: str
    run: str  # run file, run folder or model, as for `zerofit launch`
    output: str  # run folder on a shared file system
    nodes: int
    slots: int  # ranks per node: GPUs, or processors for CPU ranks
    device: Literal["gpu", "cpu"]  # device of each rank
    flags: tuple[str, ...] = ()  # further arguments of `zerofit launch`
    env: Mapping[str, str] = field(default_factory=dict)  # variables for all ranks, written into the file

    def texts(self) -> list[tuple[str, str]]:
        """Return the texts that are written into the file unchanged, each with its flag."""
        words = [("--output", self.output), ("RUN", self.run), *(("RUN", flag) for flag in self.flags)]
        return [*words, *(("--env", value) for value in self.env.values())]


def check_counts(counts: Mapping[str, int], problems: Problems) -> None:
    """Add problems for numbers below 1, each with its flag."""
    for knob, value in counts.items():
        if value < 1:
            problems.add("bad-value", f"got {value}; at least 1 is needed", "", knob)


def check_texts(texts: Iterable[tuple[str, str]], problems: Problems) -> None:
    """Add a problem for each of the (flag, text) pairs that a UTF-8 file cannot contain."""
    for knob, text in texts:
        bad = next((ch for ch in text if ch in "\0\r" or "\ud800" <= ch <= "\udfff"), None)
        if bad:
            message = f"{text!r} has the character {bad!r}, which the file cannot contain"
            problems.add("bad-value", message, "remove it", knob)


def check_line(knob: str, text: str, problems: Problems) -> None:
    """Add a problem for a text that is not one line of at most LONGEST characters."""
    bad = next((ch for ch in text if not ch.isprintable()), None)
    if bad:
        problems.add("bad-value", f"{text!r} has the character {bad!r}; one line of text is allowed", "", knob)
    if len(text) > LONGEST:
        problems.add("bad-value", f"{len(text)} characters; at most {LONGEST} are allowed", "shorten it", knob)


def check_environment(names: Iterable[str], problems: Problems) -> None:
    """Add problems for names that are not valid names of environment variables."""
    for name in names:
        if not NAME.fullmatch(name):
            message = f"{name!r} is not the name of an environment variable (letters, digits and _, no digit first)"
            problems.add("bad-value", message, "", "--env")


def write_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Write a text file (UTF-8) and return whether it is new; the umask applies to `mode`.

    Raises UserError instead of overwriting a different file.
    """
    data = text.encode()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        return True
    except FileExistsError:
        if path.is_file() and path.read_bytes() == data:
            return False
        message, hint = f"{path} exists with different content", "remove it, or write to another file"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where=str(path))) from None
    except OSError as error:
        message, hint = f"cannot write {path}: {error.strerror}", "use a file in an existing folder"
        raise UserError(Problem(kind="unwritable", message=message, hint=hint, where=str(path))) from None
