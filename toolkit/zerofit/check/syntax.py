"""Checks of a DeepSpeed JSON's text: syntax, encoding, duplicate keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from zerofit.check.document import Document
from zerofit.check.edit import Deletion, after_comma
from zerofit.check.finding import Finding
from zerofit.check.reader import SPOKEN, STRICT_READERS

MOST = 100  # duplicate keys that are reported


def form(document: Document, reader: str) -> Iterator[Finding]:
    """Yield findings about the text: not strict JSON, duplicate keys, not an object."""
    yield from _strict_json(document, reader)
    for path, first, last in islice(document.duplicates(), MOST):
        yield _duplicate(document, path, first, last)
    if not isinstance(document.config, Mapping):
        yield Finding(
            code="not-an-object",
            path="",
            message="the file is not a JSON object",
            why="DeepSpeed stops: it needs an object with keys",
            fix="write {...}",
        )


def _strict_json(document: Document, reader: str) -> Iterator[Finding]:
    """Yield what DeepSpeed's reader accepts and a strict JSON reader does not."""
    stops = reader in STRICT_READERS
    if document.encoding != "utf-8" and reader != "zerofit":
        marked = document.encoding == "utf-8-sig"
        yield Finding(
            code="encoding",
            severity="error" if stops or not marked else "warning",
            path="",
            message="the file begins with a byte order mark" if marked else f"the file is in {document.encoding}",
            why=f"{SPOKEN[reader]} reads UTF-8 {'without a mark ' if marked else ''}and stops"
            if stops or not marked
            else "DeepSpeed accepts it; Hugging Face's Trainer, Accelerate and Lightning do not",
            fix="save it as UTF-8 without a byte order mark",
            line=1,
            column=1,
        )
    if document.yaml and reader != "neox":
        yield Finding(
            code="yaml",
            path="",
            message="the file is YAML",
            why=f"{SPOKEN[reader]} reads JSON and stops",
            fix="convert it to JSON",
            line=1,
            column=1,
        )
    if document.loose:
        yield Finding(
            code="hjson",
            severity="error" if stops else "warning",
            path="",
            message=f"HJSON, not JSON, from here on: {document.loose.message}",
            why=f"{SPOKEN[reader]} reads strict JSON and stops"
            if stops
            else "DeepSpeed's own reader accepts it: a word without quotes is a string up to the end of the line",
            fix="convert it to JSON",
            line=document.loose.line,
            column=document.loose.column,
        )
    for place in document.commas:
        yield Finding(
            code="trailing-comma",
            severity="error" if stops else "warning",
            path="",
            message="trailing comma after the last member",
            why=f"{SPOKEN[reader]} reads strict JSON and stops"
            if stops
            else "DeepSpeed accepts it; Hugging Face's Trainer, Accelerate and Lightning read strict JSON and do not",
            fix="remove it",
            edits=(Deletion(place.start, place.end),),
            line=place.line,
            column=place.column,
        )
    if stops and document.comment:
        yield Finding(
            code="json-comment",
            path="",
            message="comment in a JSON",
            why=f"{SPOKEN[reader]} reads strict JSON and stops",
            fix="remove all comments",
            line=document.comment.line,
            column=document.comment.column,
        )


def _duplicate(document: Document, path: str, first: Any, last: Any) -> Finding:
    start = first.place.start
    end = after_comma(document.text, first.value.place.end)
    while document.text[end : end + 1].isspace():
        end += 1
    return Finding(
        code="duplicate-key",
        path=path,
        message=f"duplicate key {path}: here and in line {last.place.line}",
        why='DeepSpeed stops: "Duplicate keys in DeepSpeed config"; other readers use the last one',
        fix="remove one of them",
        edits=(Deletion(start, end),) if first.value.data == last.value.data else (),
        line=first.place.line,
        column=first.place.column,
    )
