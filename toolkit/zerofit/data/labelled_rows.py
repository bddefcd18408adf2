"""Rows of labelled text: lines of JSON, a table's lines or rows of a data set, and which of their fields are what."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerofit.data.hashing import name_hash
from zerofit.data.hf import VALID_SPLITS, HfSet, load_splits
from zerofit.data.jsonl import JsonlSet
from zerofit.data.plain_files import open_cells
from zerofit.data.text_sources import FileSet, Source, Survey, held_out_hash, matching_files, not_utf8_hint
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run

KINDS = ("jsonl", "hf", "csv")
# by task: the fields of what is read, of a second text, and of what is learned, where the run names none
USUAL: dict[str, tuple[str, str, str]] = {
    "classify": ("text", "text_pair", "label"),
    "tag": ("tokens", "", "tags"),
    "seq2seq-lm": ("source", "", "target"),
}
_UNNAMED = Run.model_fields["text_field"].default


class LabelledRow(NamedTuple):
    """One row of the data."""

    values: Mapping[str, Any]
    where: str  # it stands, for messages
    held_out: bool  # it is validation data


class RowSource(Source):
    """Rows with named fields."""

    @abstractmethod
    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """Yield the rows, or what is wrong with them."""

    def class_names(self, field: str) -> tuple[str, ...]:
        """Return the names that the data itself has for the numbers in a field; none where it has none."""
        return ()


@dataclass(frozen=True, kw_only=True)
class JsonlRows(JsonlSet, RowSource):
    """Files with one JSON object a line."""

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows; 5 % of the lines are held out, and at least one."""
        limit = self.held_out_up_to(documents, whole=True)
        for line in self.lines():
            row = line.read()
            if isinstance(row, Problem):
                yield row
            else:
                yield LabelledRow(row, f"{line.path}:{line.line}", name_hash(line.key) <= limit)


@dataclass(frozen=True, kw_only=True)
class CsvRows(FileSet, RowSource):
    """CSV files whose first line names the columns."""

    def survey(self, progress: Reporter) -> Survey:
        """Count the lines below the first: they are the documents."""
        return Survey(super().survey(progress).digest + "csv", sum(1 for _ in self._lines()))

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows; 5 % of the lines are held out, and at least one."""
        limit = held_out_hash((key for key, _, _ in self._lines()), documents, whole=True)
        for key, where, row in self._lines():
            if None in row or None in row.values():
                message = f"{where}: the line has {'more' if None in row else 'fewer'} cells than there are columns"
                yield Problem(kind="bad-rows", message=message, hint="quote cells that hold commas", where=where)
            else:
                yield LabelledRow(row, where, name_hash(key) <= limit)

    def _lines(self) -> Iterator[tuple[str, str, dict[Any, Any]]]:
        """Yield each line's name, place and cells. Raises UserError for what is no UTF-8 or no CSV."""
        for name, path in self.files:
            try:
                file, delimiter = open_cells(path)
                with file:
                    for number, row in enumerate(reader := csv.DictReader(file, delimiter=delimiter), 1):
                        yield f"{name}:{number}", f"{path}:{reader.line_num}", row
            except (ValueError, csv.Error) as error:
                message = f"{path} cannot be read as CSV: {error}"
                hint = not_utf8_hint(path) if isinstance(error, UnicodeDecodeError) else "mend the file"
                raise UserError(Problem(kind="bad-rows", message=message, hint=hint, where="--data")) from None


@dataclass(frozen=True, kw_only=True)
class HfRows(HfSet, RowSource):
    """Rows of a `datasets.Dataset`."""

    def rows(self, documents: int) -> Iterator[LabelledRow | Problem]:
        """See RowSource.rows; without a validation split 5 % of the rows are held out, and at least one."""
        limit = held_out_hash(map(str, range(documents)), documents, whole=True) if self.valid is None else -1
        for label, split in (("train", self.train), ("validation", self.valid)):
            for number, row in enumerate(split if split is not None else ()):
                held_out = split is self.valid or name_hash(str(number)) <= limit
                yield LabelledRow(row, f"{self.name}: {label}[{number}]", held_out)

    def class_names(self, field: str) -> tuple[str, ...]:
        """See RowSource.class_names: those of a ClassLabel, or of a list of them."""
        feature: Any = self.train.features.get(field)
        feature = getattr(feature, "feature", feature)
        return tuple(getattr(feature, "names", None) or ())


def open_rows(name: str) -> RowSource:
    """Open jsonl:GLOB, csv:GLOB or hf:NAME as rows. Raises UserError."""
    word, _, argument = name.partition(":")
    if word == "hf":
        splits = load_splits(argument)
        valid = next((splits[split] for split in VALID_SPLITS if split in splits), None)
        if "train" not in splits:
            message = f"--data {name} has no split called train; it has {', '.join(splits)}"
            raise UserError(Problem(kind="hf", message=message, hint="prepare one", where="--data"))
        return HfRows(name=name, train=splits["train"], valid=valid, what="rows")
    files = matching_files(word, argument)
    return CsvRows(name=name, files=files) if word == "csv" else JsonlRows(name=name, files=files, what="rows")


@dataclass(frozen=True, kw_only=True)
class LabelledFields:
    """The fields that are read of each row; a dot looks into an object (translation.de)."""

    text: str
    pair: str | None
    label: str


def fields_of(run: Run, task: Task, source: RowSource) -> LabelledFields:
    """Return the fields that the run names, else the usual ones of its task.

    Raises UserError with all that the first row does not have.
    """
    text, pair, label = USUAL[task]
    first = next((row for row in source.rows(1) if isinstance(row, LabelledRow)), None)
    values = first.values if first else {}
    named = run.text_field if run.text_field != _UNNAMED or value_of(values, text) is None else text
    asked = {"text_field": named, "label_field": run.label_field or label}
    if run.pair_field:
        asked["pair_field"] = run.pair_field
    problems = []
    for field, wanted in asked.items() if first else ():
        if value_of(values, wanted) is None:
            flag = "--" + field.replace("_", "-")
            wanted = text if field == "text_field" and wanted == _UNNAMED else wanted
            message = f"--data {source.name} has no {wanted!r}; there is {', '.join(map(str, values)) or 'nothing'}"
            hint = f"{flag} names it ({nearest(wanted, list(map(str, values)))})"
            problems.append(Problem(kind="text-field", message=message, hint=hint, where=flag))
    if problems:
        raise UserError(*problems)
    found = run.pair_field or (pair if pair and value_of(values, pair) is not None else None)
    return LabelledFields(text=named, pair=found, label=asked["label_field"])


def value_of(row: Mapping[str, Any], field: str) -> Any:
    """Return what a row has in a field, or in one within it; None where there is none."""
    if field in row:
        return row[field]
    outer, dot, inner = field.partition(".")
    within = row.get(outer)
    return value_of(within, inner) if dot and isinstance(within, Mapping) else None
