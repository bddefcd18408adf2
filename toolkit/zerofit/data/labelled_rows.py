"""Rows of labelled text: their sources, the meaning of their fields, and their ids."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zerofit.data.base import data_error
from zerofit.data.chat_records import Record
from zerofit.data.hashing import name_hash
from zerofit.data.hf import HfSet, train_and_valid
from zerofit.data.jsonl import JsonlSet
from zerofit.data.plain_files import open_cells
from zerofit.data.text_sources import (
    MANY,
    FileSet,
    PlacedRecord,
    RecordSource,
    Survey,
    held_out_hash,
    matching_files,
    not_utf8_hint,
)
from zerofit.data.tokenizer import Tokenizer
from zerofit.spec.errors import Problem, UserError, nearest, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import IGNORE_INDEX, Task
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from transformers import BatchEncoding

KINDS = ("jsonl", "hf", "csv")
# By task: default fields of the text, of a second text, and of the label.
DEFAULT_FIELDS: dict[str, tuple[str, str, str]] = {
    "classify": ("text", "text_pair", "label"),
    "tag": ("tokens", "", "tags"),
    "seq2seq-lm": ("source", "", "target"),
}
BYTES_PAD = 258  # padding id of the tokenizer `bytes`
_DEFAULT_TEXT_FIELD = Run.model_fields["text_field"].default


@dataclass(frozen=True, kw_only=True)
class CsvRows(FileSet, RecordSource):
    """CSV files whose first line names the columns."""

    def survey(self, progress: Reporter) -> Survey:
        """Count the documents. Each line after the first line is a document."""
        return Survey(super().survey(progress).digest + "csv", sum(1 for _ in self._lines()))

    def records(self, documents: int) -> Iterator[PlacedRecord | Problem]:
        """See RecordSource.records; 5 % of the lines are held out."""
        limit = held_out_hash((key for key, _, _ in self._lines()), documents, whole_documents=True)
        for key, where, row in self._lines():
            if None in row or None in row.values():
                message = f"{where}: the line has {'more' if None in row else 'fewer'} cells than there are columns"
                yield Problem(kind="bad-rows", message=message, hint="quote cells that contain commas", where=where)
            else:
                yield PlacedRecord(row, where, name_hash(key) <= limit)

    def _lines(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Yield each line's name, place and cells. Raises UserError for invalid UTF-8 or CSV.

        The key None has cells without a column, and the value None is a missing cell, as in csv.DictReader.
        """
        for name, path in self.files:
            try:
                file, delimiter = open_cells(path)
                with file:
                    for number, row in enumerate(reader := csv.DictReader(file, delimiter=delimiter), 1):
                        # A quoted cell may contain line breaks. So a row's number names it, and the line shows its
                        # place in the file.
                        yield f"{name}:{number}", f"{path}:{reader.line_num}", row
            except (ValueError, csv.Error) as error:
                message = f"cannot read {path} as CSV: {error}"
                hint = not_utf8_hint(path) if isinstance(error, UnicodeDecodeError) else "fix the file"
                raise data_error("bad-rows", message, hint) from None


def open_rows(name: str) -> RecordSource:
    """Open jsonl:GLOB, csv:GLOB or hf:NAME as rows. Raises UserError."""
    word, _, argument = name.partition(":")
    if word == "hf":
        train, valid = train_and_valid(argument)
        return HfSet(name=name, train=train, valid=valid, what="rows")
    files = matching_files(word, argument)
    return CsvRows(name=name, files=files) if word == "csv" else JsonlSet(name=name, files=files, what="rows")


@dataclass(frozen=True, kw_only=True)
class LabelledFields:
    """The fields to read of each row; a dot selects a field in an object (translation.de)."""

    text: str
    pair: str | None
    label: str


def fields_of(run: Run, task: Task, source: RecordSource) -> LabelledFields:
    """Return the fields that the run names, else the defaults of its task.

    Raises UserError with all fields that the first row lacks.
    """
    text, pair, label = DEFAULT_FIELDS[task]
    # With many documents, `records` finds the limit of held-out rows without a pass over the file.
    first = next((row for row in source.records(MANY + 1) if isinstance(row, PlacedRecord)), None)
    values = first.values if first else {}
    # The run's own default is for plain text, so the task's default replaces it if the data have it.
    # A user who writes the default explicitly cannot be distinguished from one who writes nothing.
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


class Labelled(NamedTuple):
    """The content of one row."""

    text: str | list[str]  # a list of words if each word has a tag
    pair: str | None
    label: str | list[str]  # class name, tags of the words, or target text


class EncodedLabelled(NamedTuple):
    """One sample: ids, the segment of each id (for pairs of texts), and labels."""

    ids: np.ndarray
    types: np.ndarray  # segment of each id; zeros without a pair
    labels: np.ndarray  # a class, one per id (-100: none), or ids of the target
    cut: bool  # whether the text was truncated to the sample's length


def read_row(values: Record, fields: LabelledFields, task: Task, names: Sequence[str]) -> Labelled | str:
    """Return a row's content, or an error text. `names`: the data's names of class numbers."""
    text, label = value_of(values, fields.text), value_of(values, fields.label)
    if task == "tag":
        return _read_words(text, label, fields, names)
    if not isinstance(text, str):
        return f"{fields.text!r} is {type(text).__name__}, not a string"
    pair = None
    if fields.pair:
        pair = value_of(values, fields.pair)
        if not isinstance(pair, str):
            return f"{fields.pair!r} is {type(pair).__name__}, not a string"
    if task == "seq2seq-lm":
        return Labelled(text, None, label) if isinstance(label, str) else _wrong(fields.label, label, "a string")
    class_name = _class_name(label, names)
    if class_name is None:
        return _wrong(fields.label, label, "a class: a word or a number")
    return Labelled(text, pair, class_name)


def _read_words(words: object, tags: object, fields: LabelledFields, names: Sequence[str]) -> Labelled | str:
    """Return the content of a row of words with tags, or an error text."""
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return _wrong(fields.text, words, "a list of words")
    if not isinstance(tags, list) or len(tags) != len(words):
        return _wrong(fields.label, tags, f"a list of {len(words)} tags, one per word")
    tag_names = [_class_name(tag, names) for tag in tags]
    wrong = next((tag for tag, name in zip(tags, tag_names, strict=True) if name is None), None)
    if None in tag_names:
        return _wrong(fields.label, wrong, "tags: words or integers")
    return Labelled(words, None, [name for name in tag_names if name is not None])


def _class_name(value: object, names: Sequence[str]) -> str | None:
    """Return the class of a label, by `names` if it is a number; None if it is no class."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or (isinstance(value, int) and not names and value >= 0):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def _wrong(field: str, value: object, needed: str) -> str:
    return f"{field!r} is {str(value)[:40]!r} ({type(value).__name__}), not {needed}"


@dataclass(frozen=True, kw_only=True)
class LabelledEncoder:
    """Tokenizer for one task, with the special tokens that its model expects."""

    tokenizer: Tokenizer
    task: Task
    length: int  # maximum tokens of a text
    target_length: int

    @property
    def pad_id(self) -> int:
        """The padding id."""
        if self.tokenizer.loaded is None:
            return BYTES_PAD
        pad_id = self.tokenizer.loaded.pad_token_id
        return self.tokenizer.eod_id if pad_id is None else pad_id

    def encode_all(self, rows: Sequence[Labelled], classes: Mapping[str, int]) -> list[EncodedLabelled]:
        """Return the samples of these rows. `classes`: numbers of the class names."""
        if not rows:
            return []
        texts = self._encode_bytes(rows) if self.tokenizer.loaded is None else self._encode_loaded(rows)
        if self.task == "classify":
            numbers = [np.array([classes[str(row.label)]]) for row in rows]
            return [EncodedLabelled(text.ids, text.types, n, text.cut) for text, n in zip(texts, numbers, strict=True)]
        if self.task == "tag":
            return [self._tagged(text, row, classes) for text, row in zip(texts, rows, strict=True)]
        targets = self._targets([str(row.label) for row in rows])
        return [
            EncodedLabelled(text.ids, text.types, target, text.cut or cut)
            for text, (target, cut) in zip(texts, targets, strict=True)
        ]

    # As in BERT (Devlin et al., 2019, section 5.3): further tokens of a word have no label.
    def _tagged(self, text: _Text, row: Labelled, classes: Mapping[str, int]) -> EncodedLabelled:
        labels, before = np.full(len(text.ids), IGNORE_INDEX), None
        for token, word in enumerate(text.words):
            if word is not None and word != before:
                labels[token] = classes[row.label[word]]
            before = word
        return EncodedLabelled(text.ids, text.types, labels, text.cut)

    def _encode_bytes(self, rows: Sequence[Labelled]) -> list[_Text]:
        """Put an end-of-document id before, between and after the parts; words start with a space."""
        end, encoded_texts, is_words = self.tokenizer.eod_id, [], self.task == "tag"
        # As in BERT, the first id is a special one, whose output the head of a classifier may read.
        lead = [] if self.task == "seq2seq-lm" else [end]
        longest = self.length - 1  # the last token is the end id
        for row in rows:
            if isinstance(row.text, list):
                parts = [f" {word}" for word in row.text]
            else:
                parts = [row.text] if row.pair is None else [row.text, row.pair]
            ids: list[int] = list(lead)
            words: list[int | None] = [None] * len(lead)
            for number, part in enumerate(self.tokenizer.encode_all(parts)):
                between = [end] if number and not is_words else []
                ids += [*between, *part.tolist()]
                words += [*([None] * len(between)), *([number] * len(part))]
            text_ids, words_of_ids = [*ids[:longest], end], [*words[:longest], None]
            types = np.zeros(len(text_ids), dtype=np.int64)
            encoded_texts.append(_Text(np.array(text_ids), types, words_of_ids, len(ids) > longest))
        return encoded_texts

    def _encode_loaded(self, rows: Sequence[Labelled]) -> list[_Text]:
        """Encode the texts with the transformers tokenizer and its special tokens."""
        encoded = self._tokenized(rows)
        encoded_texts = []
        for number, ids in enumerate(encoded["input_ids"]):
            encoding = encoded.encodings[number] if encoded.encodings else None
            types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else [0] * len(ids)
            # Without the Rust library, nothing tells a cut text from one that fits exactly.
            cut = bool(encoding.overflowing) if encoding else len(ids) == self.length
            words = encoding.word_ids if self.task == "tag" and encoding else []
            if not len(ids):  # an empty text, with a tokenizer that adds nothing
                ids, types, words = [self.tokenizer.eod_id], [0], [None]
            encoded_texts.append(_Text(np.array(ids), np.array(types), words, cut))
        return encoded_texts

    def _tokenized(self, rows: Sequence[Labelled]) -> BatchEncoding:
        """Return the transformers tokenizer's result for these rows. Raises UserError."""
        loaded = self.tokenizer.loaded
        texts = [row.text for row in rows]
        pairs = [row.pair for row in rows] if rows[0].pair is not None else None
        options = {"is_split_into_words": True} if self.task == "tag" else {}
        if options and not loaded.is_fast:
            message = f"--tokenizer {self.tokenizer.name} cannot map tokens to words"
            hint = "use a tokenizer with a tokenizer.json for --task tag"
            raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))
        options |= {"truncation": True, "max_length": self.length, "return_attention_mask": False}
        try:
            return loaded(texts, pairs, verbose=False, **options)
        except (AssertionError, ValueError, TypeError) as error:
            message = f"--tokenizer {self.tokenizer.name} rejects this text: {reason_of(error)}"
            hint = "byte-level tokenizers need add_prefix_space in tokenizer_config.json"
            raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer")) from None

    def _targets(self, texts: list[str]) -> list[tuple[np.ndarray, bool]]:
        """Return the ids of targets, each ending with the end-of-document id."""
        end, loaded = self.tokenizer.eod_id, self.tokenizer.loaded
        if loaded is None:
            rows = self.tokenizer.encode_all(texts)
        else:
            rows = loaded(text_target=texts, return_attention_mask=False, verbose=False)["input_ids"]
        targets = []
        for row in rows:
            ids = list(row)
            ids = ids[:-1] if ids and ids[-1] == end else ids  # some tokenizers end a target themselves
            target = [*ids[: self.target_length - 1], end]
            targets.append((np.array(target), len(ids) >= self.target_length))
        return targets


class _Text(NamedTuple):
    """A text as ids, before its labels are added; see EncodedLabelled."""

    ids: np.ndarray
    types: np.ndarray
    words: Sequence[int | None]  # the word of each id; None for a special token
    cut: bool
