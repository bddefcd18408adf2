"""Files for a scheduler: what of a user's text they can hold; written once, never over another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerofit.spec.errors import Problem, Problems, UserError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # POSIX, 8.1: names of environment variables


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """The content of a file for any scheduler. Everything is data: no value of it is read by a shell or expanded."""

    name: str
    run: str  # run file, run folder or model: what `zerofit launch` takes
    output: str  # run folder, on a file system that all nodes share
    nodes: int
    slots: int  # ranks on a node: GPUs, or processors for ranks on the CPU
    device: Literal["gpu", "cpu"]  # of a rank
    flags: tuple[str, ...] = ()  # further arguments of `zerofit launch`
    env: Mapping[str, str] = field(default_factory=dict)  # for all ranks, written into the file

    def texts(self) -> list[tuple[str, str]]:
        """Return what stands in the file as it was given, each text with its knob."""
        words = [("--output", self.output), ("RUN", self.run), *(("RUN", flag) for flag in self.flags)]
        return [*words, *(("--env", value) for value in self.env.values())]


def check_counts(counts: Mapping[str, int], problems: Problems) -> None:
    """Note numbers, each under its knob, that are below 1."""
    for knob, value in counts.items():
        if value < 1:
            problems.add("bad-value", f"got {value}; at least 1 is needed", "", knob)


def check_texts(texts: Iterable[tuple[str, str]], problems: Problems) -> None:
    """Note the texts, each with its knob, that no UTF-8 file of commands can hold."""
    for knob, text in texts:
        found = next((ch for ch in text if ch in "\0\r" or "\ud800" <= ch <= "\udfff"), None)
        if found:
            message = f"{text!r} has the character {found!r}, which the file cannot hold"
            problems.add("bad-value", message, "take it out", knob)


def check_line(knob: str, text: str, problems: Problems, longest: int = 1000) -> None:
    """Note a text that has to stand on one line of at most `longest` characters and does not."""
    found = next((ch for ch in text if not ch.isprintable()), None)
    if found:
        problems.add("bad-value", f"{text!r} has the character {found!r}; one line of text is allowed", "", knob)
    if len(text) > longest:
        problems.add("bad-value", f"{len(text)} characters; at most {longest} are allowed", "shorten it", knob)


def check_environment(names: Iterable[str], problems: Problems) -> None:
    """Note names that no shell takes as a variable's."""
    for name in names:
        if not NAME.fullmatch(name):
            message = f"{name!r} is not the name of an environment variable (letters, digits and _, no digit first)"
            problems.add("bad-value", message, "", "--env")


def write_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Write a text file (UTF-8) and return whether it is new; `mode` is cut by the umask.

    Raises UserError rather than changing a file that differs.
    """
    data = text.encode()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        return True
    except FileExistsError:
        if path.is_file() and path.read_bytes() == data:
            return False
        message, hint = f"{path} exists already and holds something else", "remove it, or write to another file"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where=str(path))) from None
    except OSError as error:
        message, hint = f"cannot write {path}: {error.strerror}", "name a file in a folder that exists"
        raise UserError(Problem(kind="unwritable", message=message, hint=hint, where=str(path))) from None
