"""Checks of a DeepSpeed JSON's text: syntax, encoding, duplicate keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from zerofit.check.document import Document
from zerofit.check.edit import Deletion, after_comma
from zerofit.check.finding import Finding
from zerofit.check.reader import SPOKEN, STRICT_READERS
from zerofit.check.scan import ObjectMember

MAX_DUPLICATES = 100  # duplicate keys with a finding each


def text_findings(document: Document, reader: str) -> Iterator[Finding]:
    """Yield findings about the text: no strict JSON, duplicate keys, no object."""
    yield from _strict_json(document, reader)
    for path, first, last in islice(document.duplicates(), MAX_DUPLICATES):
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
    # DeepSpeed itself reads HJSON: comments, trailing commas and words without quotes. Other readers stop there.
    stops = reader in STRICT_READERS
    strict = f"{SPOKEN[reader]} supports only strict JSON and stops with an error"
    if document.encoding != "utf-8" and reader != "zerofit":
        yield _encoding(document, reader, stops)
    if document.yaml and reader != "neox":
        why = f"{SPOKEN[reader]} supports only JSON and stops with an error"
        yield Finding(
            code="yaml", path="", message="the file is YAML", why=why, fix="convert it to JSON", line=1, column=1
        )
    if document.hjson:
        accepts = "DeepSpeed's own reader accepts it: a word without quotes is a string up to the end of the line"
        yield Finding(
            code="hjson",
            severity="error" if stops else "warning",
            path="",
            message=f"HJSON, not JSON, from here on: {document.hjson.message}",
            why=strict if stops else accepts,
            fix="convert it to JSON",
            line=document.hjson.line,
            column=document.hjson.column,
        )
    for comma in document.commas:
        accepts = "DeepSpeed accepts it; Hugging Face's Trainer, Accelerate and Lightning need strict JSON"
        yield Finding(
            code="trailing-comma",
            severity="error" if stops else "warning",
            path="",
            message="trailing comma after the last member",
            why=strict if stops else accepts,
            fix="remove it",
            edits=(Deletion(comma.start, comma.end),),
            line=comma.line,
            column=comma.column,
        )
    if stops and document.comment:
        yield Finding(
            code="json-comment",
            path="",
            message="comment in a JSON",
            why=strict,
            fix="remove all comments",
            line=document.comment.line,
            column=document.comment.column,
        )


def _encoding(document: Document, reader: str, stops: bool) -> Finding:
    marked = document.encoding == "utf-8-sig"
    refuses = (
        f"{SPOKEN[reader]} supports only UTF-8 {'without a byte order mark ' if marked else ''}and stops with an error"
    )
    accepts = "DeepSpeed accepts it; Hugging Face's Trainer, Accelerate and Lightning do not"
    return Finding(
        code="encoding",
        severity="error" if stops or not marked else "warning",
        path="",
        message="the file begins with a byte order mark" if marked else f"the file is in {document.encoding}",
        why=refuses if stops or not marked else accepts,
        fix="save it as UTF-8 without a byte order mark",
        line=1,
        column=1,
    )


def _duplicate(document: Document, path: str, first: ObjectMember, last: ObjectMember) -> Finding:
    """Return the finding about an earlier member with the key of the last one."""
    start = first.place.start
    # A later member follows, so there is a comma, and the blanks after it belong to the removed member.
    end = after_comma(document.text, first.value.place.end)
    while document.text[end : end + 1].isspace():
        end += 1
    return Finding(
        code="duplicate-key",
        path=path,
        message=f"duplicate key {path}: here and on line {last.place.line}",
        why='DeepSpeed stops: "Duplicate keys in DeepSpeed config"; other readers use the last value',
        fix="remove one of them",
        edits=(Deletion(start, end),) if first.value.data == last.value.data else (),
        line=first.place.line,
        column=first.place.column,
    )
