"""Read the commands of a shell script without running the script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

UNKNOWN = "\0"  # marks the part of a word that is known only when the script runs
RUN = r"\$\(\(.*?\)\)|\$\([^)]*\)|`[^`]*`"  # command substitution and arithmetic inside a word
WORD = rf"""(?:'[^']*'|"(?:\\.|[^"\\])*"|{RUN}|\$\{{[^}}]*\}}|\\[^\n]|[^\s;&|'"\\`)])+"""
TOKEN = re.compile(
    rf"""(?P<joined>\\\r?\n)
    |(?P<redirection>(?<!\S)[\d&]?(?:>>?|<)(?!\()(?:&[\d-]|[ \t]*{WORD}))
    |(?P<end>\r?\n|;|&&|\|\|?|&)
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<array>[A-Za-z_]\w*\+?=\()|(?P<close>\))
    |(?P<word>{WORD})
    |(?P<blank>.)""",
    re.DOTALL | re.VERBOSE,
)
PART = re.compile(
    rf"""'(?P<raw>[^']*)'|"(?P<quoted>(?:\\.|[^"\\])*)"|(?P<bare>(?:{RUN}|\$\{{[^}}]*\}}|[^'"])+)""", re.DOTALL
)
REFERENCE = re.compile(
    rf"""{RUN}|\$\{{(?P<name>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}}]*))?\}}
    |\$(?P<short>\w+|[@*\#?$!-])|\$\{{[^}}]*\}}""",
    re.DOTALL | re.VERBOSE,
)
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
BEFORE = ("export", "local", "declare", "readonly")  # words before an assignment


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of a command, and its line."""

    text: str
    line: int


def commands(text: str) -> Iterator[list[Word]]:
    """Yield the words of each command, without redirections and with the script's variables."""
    known: dict[str, list[Word]] = {}  # one word, or the words of an array
    words: list[Word] = []
    array: str | None = None
    line = 1
    for found in TOKEN.finditer(text):
        kind, token = found.lastgroup, found.group()
        if kind == "array":
            array = token[: token.index("=")].rstrip("+")
            known[array] = known.get(array, []) if "+=" in token else []
        elif kind == "close":
            array = None
        elif kind == "word" and array:
            known[array] = [*known[array], *_expanded(token, line, known)]
        elif kind == "word":
            # NAME=value at the beginning of a command, perhaps after `export`
            assigned = ASSIGNED.match(token) if all(word.text in BEFORE for word in words) else None
            if assigned:
                value = " ".join(word.text for word in _expanded(assigned["value"], line, known))
                known[assigned["name"]] = [Word(text=value, line=line)]
            else:
                words += _expanded(token, line, known)
        elif kind == "end" and words and not array:
            yield words
            words = []
        line += token.count("\n")
    if words:
        yield words


def _expanded(token: str, line: int, known: Mapping[str, list[Word]]) -> list[Word]:
    """Expand the variables of a token."""
    # An array, or a variable without quotes, may become several words.
    reference = REFERENCE.fullmatch(token.strip('"') if "[@]" in token else token)
    name = (reference["name"] or reference["short"] or "") if reference else ""
    if name in known:
        return [Word(text=part, line=word.line) for word in known[name] for part in word.text.split()]

    def value(found: re.Match[str]) -> str:
        words = known.get(found["name"] or found["short"] or "")
        return (found["default"] or UNKNOWN) if words is None else " ".join(word.text for word in words)

    # Single quotes keep everything as it is. In double quotes and without quotes, \ escapes and $ expands.
    def unquoted(part: re.Match[str]) -> str:
        text = part["bare"] if part["quoted"] is None else part["quoted"]
        return part["raw"] or REFERENCE.sub(value, re.sub(r"\\(.)", r"\1", text or ""))

    return [Word(text=PART.sub(unquoted, token), line=line)]
