"""What of a user's text can be written into a file for a scheduler, and what cannot."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerofit.spec.errors import Problems

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # POSIX, 8.1: names of environment variables


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
