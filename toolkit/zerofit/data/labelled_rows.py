"""Rows of labelled text: lines of JSON, rows of a table or data set, and the meaning of their fields."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zerofit.data.chat_records import Record
from zerofit.data.hashing import name_hash
from zerofit.data.hf import HfSet, train_and_valid
from zerofit.data.jsonl import JsonlSet
from zerofit.data.plain_files import open_cells
from zerofit.data.text_sources import FileSet, Source, Survey, held_out_hash, matching_files, not_utf8_hint
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run

KINDS = ("jsonl", "hf", "csv")
# By task: default fields of the text, of a second text, and of the label.
DEFAULT_FIELDS: dict[str, tuple[str, str, str]] = {
    "classify": ("text", "text_pair", "label"),
    "tag": ("tokens", "", "tags"),
    "seq2seq-lm": ("source", "", "target"),
}
_DEFAULT_TEXT_FIELD = Run.model_fields["text_field"].default


class LabelledRow(NamedTuple):
    """One row of the data."""

    values: Record
    where: str  # place, for messages
    held_out: bool  # belongs to validation data


class RowSource(Source):
    """Rows with named fields."""

    @abstractmethod
    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """Yield the rows, or problems with them."""

    def class_names(self, field: str) -> tuple[str, ...]:
        """Return the data's own names for the class numbers in `field`; () without such names."""
        return ()


@dataclass(frozen=True, kw_only=True)
class JsonlRows(JsonlSet, RowSource):
    """Files with one JSON object per line."""

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows; 5 % of the lines, at least one, are held out."""
        for line, row, held_out in self.read_lines(documents):
            yield row if isinstance(row, Problem) else LabelledRow(row, f"{line.path}:{line.line}", held_out)


@dataclass(frozen=True, kw_only=True)
class CsvRows(FileSet, RowSource):
    """CSV files whose first line names the columns."""

    def survey(self, progress: Reporter) -> Survey:
        """Count the documents. Each line after the first line is a document."""
        return Survey(super().survey(progress).digest + "csv", sum(1 for _ in self._lines()))

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows; 5 % of the lines, at least one, are held out."""
        limit = held_out_hash((key for key, _, _ in self._lines()), documents, whole_documents=True)
        for key, where, row in self._lines():
            if None in row or None in row.values():
                message = f"{where}: the line has {'more' if None in row else 'fewer'} cells than there are columns"
                yield Problem(kind="bad-rows", message=message, hint="quote cells that contain commas", where=where)
            else:
                yield LabelledRow(row, where, name_hash(key) <= limit)

    def _lines(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield each line's name, place and cells. Raises UserError for invalid UTF-8 or CSV.

        The key None has cells without a column, and the value None is a missing cell, as in csv.DictReader.
        """
        for name, path in self.files:
            try:
                file, delimiter = open_cells(path)
                with file:
                    for number, row in enumerate(reader := csv.DictReader(file, delimiter=delimiter), 1):
                        yield f"{name}:{number}", f"{path}:{reader.line_num}", row
            except (ValueError, csv.Error) as error:
                message = f"cannot read {path} as CSV: {error}"
                hint = not_utf8_hint(path) if isinstance(error, UnicodeDecodeError) else "fix the file"
                raise UserError(Problem(kind="bad-rows", message=message, hint=hint, where="--data")) from None


@dataclass(frozen=True, kw_only=True)
class HfRows(HfSet, RowSource):
    """Rows of a `datasets.Dataset`."""

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows."""
        return (LabelledRow(*placed) for placed in self.placed_rows(documents))

    def class_names(self, field: str) -> tuple[str, ...]:
        """See RowSource.class_names; the names of a ClassLabel, or of a list of them."""
        feature: object = self.train.features.get(field)
        feature = getattr(feature, "feature", feature)
        return tuple(getattr(feature, "names", None) or ())


def open_rows(name: str) -> RowSource:
    """Open jsonl:GLOB, csv:GLOB or hf:NAME as rows. Raises UserError."""
    word, _, argument = name.partition(":")
    if word == "hf":
        train, valid = train_and_valid(argument)
        return HfRows(name=name, train=train, valid=valid, what="rows")
    files = matching_files(word, argument)
    return CsvRows(name=name, files=files) if word == "csv" else JsonlRows(name=name, files=files, what="rows")


@dataclass(frozen=True, kw_only=True)
class LabelledFields:
    """The fields to read of each row; a dot selects a field in an object (translation.de)."""

    text: str
    pair: str | None
    label: str


def fields_of(run: Run, task: Task, source: RowSource) -> LabelledFields:
    """Return the fields that the run names, else the defaults of its task.

    Raises UserError with all fields that the first row lacks.
    """
    text, pair, label = DEFAULT_FIELDS[task]
    first = next((row for row in source.rows(1) if isinstance(row, LabelledRow)), None)
    values = first.values if first else {}
    # The run's own default is for plain text, so the task's default replaces it if the data have it.
    is_default = run.text_field == _DEFAULT_TEXT_FIELD
    text_field = text if is_default and value_of(values, text) is not None else run.text_field
    wanted_fields = {"text_field": text_field, "label_field": run.label_field or label}
    if run.pair_field:
        wanted_fields["pair_field"] = run.pair_field
    problems = []
    for field, wanted in wanted_fields.items() if first else ():
        if value_of(values, wanted) is None:
            flag = "--" + field.replace("_", "-")
            wanted = text if field == "text_field" and is_default else wanted
            message = f"--data {source.name} has no field {wanted!r}; it has {', '.join(map(str, values)) or 'none'}"
            hint = f"set {flag} ({nearest(wanted, list(map(str, values)))})"
            problems.append(Problem(kind="text-field", message=message, hint=hint, where=flag))
    if problems:
        raise UserError(*problems)
    pair_field = run.pair_field or (pair if pair and value_of(values, pair) is not None else None)
    return LabelledFields(text=text_field, pair=pair_field, label=wanted_fields["label_field"])


def value_of(row: Record, field: str) -> object:
    """Return the value of a row's field or of a field inside an object; None if it is missing."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    within = row.get(outer)
    return value_of(within, inner) if dot and isinstance(within, Mapping) else None
