"""Lines of JSON: a text in a field of each, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zerofit.data.chat_records import ChatForm, ChatMessages, conversation_of, form_of, judged_answers
from zerofit.data.chat_source import ChatPiece, ChatSource
from zerofit.data.hashing import name_hash
from zerofit.data.text_sources import (
    NAMED,
    FileSet,
    Source,
    Survey,
    TextPiece,
    TextSource,
    held_out_hash,
    matching_files,
    split_text,
)
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run


class JsonLine(NamedTuple):
    """A line that is not blank."""

    name: str  # of its file, as it orders and splits
    path: Path
    number: int  # from 1
    raw: bytes

    @property
    def key(self) -> str:
        """The name of the document, by which it is held out or not."""
        return f"{self.name}:{self.number}"

    def problem(self, kind: str, column: int, message: str, hint: str) -> Problem:
        """Return what is wrong with the line, at its place."""
        where = f"{self.path}:{self.number}:{column}"
        return Problem(kind=kind, message=f"{where}: {message}", hint=hint, where=where)

    def read(self) -> dict | Problem:
        """Return the line's object, or what is wrong with it."""
        try:
            row = json.loads(self.raw.decode())
        except UnicodeDecodeError as error:
            message = f"byte 0x{self.raw[error.start]:02x} is not UTF-8"
            return self.problem("bad-jsonl", error.start + 1, message, "iconv -t utf-8 converts it")
        except json.JSONDecodeError as error:
            return self.problem("bad-jsonl", error.colno, f"not JSON: {error.msg}", "each line is one JSON object")
        except (RecursionError, ValueError) as error:  # thousands of brackets or digits
            return self.problem("bad-jsonl", 1, f"too much for a reader of JSON: {error}", "mend or remove the line")
        if not isinstance(row, dict):
            message = f"got a JSON {type(row).__name__}, need an object"
            return self.problem("bad-jsonl", 1, message, '{"text": "..."}, or {"messages": [...]}')
        return row


@dataclass(frozen=True, kw_only=True)
class JsonlSet(FileSet):
    """Files with one document a line, of which `what` is read."""

    what: str  # a field, or a form of conversations

    def fingerprint(self) -> str:
        """Hash names, sizes and times of change, and name what is read."""
        return super().fingerprint() + self.what

    def survey(self, progress: Reporter) -> Survey:
        """Count the lines that are not blank: they are the documents."""
        return Survey(super().survey(progress).digest + self.what, sum(1 for _ in self.lines()))

    def lines(self) -> Iterator[JsonLine]:
        """Yield the lines that are not blank."""
        for name, path in self.files:
            with path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    if raw.strip():
                        yield JsonLine(name, path, number, raw)

    def held_out_up_to(self, documents: int, whole: bool = False) -> int:
        """Return the name hash up to which lines are validation data (see `held_out_hash`)."""
        return held_out_hash((line.key for line in self.lines()), documents, whole)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(JsonlSet, TextSource):
    """Files with one document per line, in a field of a JSON object."""

    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """See TextSource.pieces; up to 20 bad lines are named file:line:column."""
        limit = self.held_out_up_to(documents)
        problems: list[Problem] = []
        for line in self.lines():
            text = _text_of(line, self.what)
            if isinstance(text, str):
                yield from split_text(line.key, text, limit)
                continue
            problems.append(text)
            if len(problems) >= NAMED:
                break
        if problems:
            raise UserError(*problems)


def _text_of(line: JsonLine, field: str) -> str | Problem:
    """Return the text of one line, or what is wrong with it."""
    row = line.read()
    if isinstance(row, Problem):
        return row
    if field not in row:
        message = f"no field {field!r}; there is {', '.join(row) or 'none'}"
        return line.problem("bad-jsonl", 1, message, f"--text-field: {nearest(field, row)}")
    if not isinstance(row[field], str):
        message = f"field {field!r} is {type(row[field]).__name__}, need a string"
        return line.problem("bad-jsonl", 1, message, "--text-field names another")
    # JSON can spell half of a surrogate pair, which is not a character and has no bytes.
    return row[field].encode("utf-8", "replace").decode()


@dataclass(frozen=True, kw_only=True)
class JsonlChats(JsonlSet, ChatSource):
    """Files with one conversation a line."""

    form: ChatForm

    def pieces(self, documents: int) -> Iterator[ChatPiece | Problem]:
        """See ChatSource.pieces."""
        limit = self.held_out_up_to(documents, whole=True)
        for line in self.lines():
            row = line.read()
            if isinstance(row, Problem):
                yield row
                continue
            found = conversation_of(row, self.form)
            if isinstance(found, ChatMessages):
                yield ChatPiece(found, f"{line.path}:{line.number}", name_hash(line.key) <= limit)
            else:
                yield line.problem("bad-chat", 1, found, f"the first line is in the {self.form.title} form")


def open_jsonl(run: Run, argument: str) -> Source:
    """Open lines as documents: the field `run.text_field` of a JSON object, or conversations; blank lines do not count.

    Conversations are recognised by the first line, unless it has the field. With 20 documents or more, 5 % of them (by
    hash of file and line number) are held out; with fewer, the last 5 % of each text, and one conversation. Raises
    UserError "empty-data" when nothing matches.
    """
    named = {"name": f"jsonl:{argument}", "files": matching_files("jsonl", argument)}
    source = JsonlSource(**named, what=run.text_field)
    rows = (row for row in map(JsonLine.read, source.lines()) if isinstance(row, dict))
    first = next(rows, {})
    if problem := judged_answers(first, run.text_field, named["name"]):
        raise UserError(problem)
    form = form_of(first, run.text_field)
    return JsonlChats(**named, what=form.title, form=form) if form else source
