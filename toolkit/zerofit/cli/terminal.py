"""Standard output and error of all commands, without escape sequences from data.

Folder names, configs and library messages can contain escape sequences. zerofit prints these sequences as visible text.
"""

from __future__ import annotations

import codecs
import io
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import click

# C0 except tab and newline, DEL, C1 (ECMA-48), marks that reverse text (UAX 9), and surrogates
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# U+FDD0 is a noncharacter of Unicode: no text should contain it.
MARK = f"\ufdd0{secrets.token_hex(8)}"  # the escape character in our own styles; data cannot guess it
_STYLE = re.compile(rf"{MARK}\[[\d;]*m")


def visible(text: str) -> str:
    r"""Escape control characters as Python does.

    >>> print(visible("red: \x1b[31m"))
    red: \x1b[31m
    """
    # DEL becomes \u007f, as in JSON.
    return COMMANDS.sub(lambda found: "\\u007f" if found[0] == "\x7f" else repr(found[0])[1:-1], text)


def style(text: str, **looks: Any) -> str:
    """Style text with `click.style` within `safe_output`; otherwise return it unchanged."""
    if not isinstance(sys.stdout, SafeStream):
        return text
    # MARK stands for the escape character of the style, so that `SafeStream` does not escape it.
    return click.style("\0", **looks).replace("\x1b", MARK).replace("\0", text)


def write_data(text: str, err: bool = False) -> None:
    """Write output that programs may read, such as generated text.

    Control characters are escaped only if the stream is a terminal.
    """
    stream = sys.stderr if err else sys.stdout
    stream.write(text if stream.isatty() else SafeText(text))
    stream.flush()


class SafeText(str):
    """Text that a `SafeStream` writes unchanged."""

    __slots__ = ()


class SafeStream:
    """A text stream that escapes control characters, except in zerofit's own styles."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's encoding; Latin-1 instead of ASCII."""
        # click opens a copy of an ASCII stream. The copy would print the marks and escape sequences.
        encoding = self._stream.encoding or "ascii"
        return "latin-1" if codecs.lookup(encoding).name == "ascii" else encoding

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, and return its length."""
        if not isinstance(text, str):
            raise TypeError(f"expected str, got {type(text).__name__}")
        shown = text
        if not isinstance(text, SafeText):
            # A leading carriage return stays, because libraries' progress bars need it.
            shown = "\r" * text.startswith("\r") + visible(text.removeprefix("\r"))
            shown = shown.replace(MARK, "\x1b") if self._stream.isatty() else _STYLE.sub("", shown)
        self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)


@contextmanager
def safe_output() -> Iterator[None]:
    """Make both standard streams safe within the block."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":  # for text that its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    # A style counts only within this block. So text that a program reads has no escape sequences.
    former: object = sys.stdout, sys.stderr
    safe: object = SafeStream(sys.stdout), SafeStream(sys.stderr)
    sys.stdout, sys.stderr = safe
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former
