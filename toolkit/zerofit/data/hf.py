"""Data sets on the Hugging Face hub, or in files that the `datasets` library can read."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from urllib.parse import urlsplit

from zerofit.data.base import data_error
from zerofit.data.chat_records import field_hint, form_of, refused_record
from zerofit.data.hashing import name_hash, text_digest
from zerofit.data.plain_files import COMPRESSED, delimiter_of
from zerofit.data.text_sources import (
    ChatSource,
    PlacedRecord,
    RecordSource,
    Survey,
    TextPiece,
    TextSource,
    held_out_hash,
    split_text,
)
from zerofit.spec.errors import Problem, UserError, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDatasetDict

# in this order: a set with both has the split `test` for a last evaluation, which training must not see
VALID_SPLITS = ("validation", "valid", "dev", "test")
ROWS = 256  # rows read at a time
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".txt": "text"}  # by suffix
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@contextmanager
def hub_if_reachable(*clients: ModuleType) -> Iterator[None]:
    """Make hub clients use only local files if this machine cannot resolve the hub's address.

    `clients`: modules, besides huggingface_hub, that have a flag HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants

    with ExitStack() as changes:
        for module in () if _reachable(constants.ENDPOINT) else (constants, *clients):
            changes.enter_context(patch.object(module, "HF_HUB_OFFLINE", True))
        yield


# Compute nodes often have no network. A failing name look-up is quick, while the hub's client retries each file five
# times with growing delays.
@lru_cache
def _reachable(endpoint: str) -> bool:
    if any(os.environ.get(name) for name in _PROXIES):
        return True  # a proxy resolves the hub's name
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def open_hf(run: Run, argument: str) -> TextSource | ChatSource:
    """Open NAME or NAME:CONFIG: a text in the column `run.text_field` or a conversation per row.

    NAME may be a local folder or file. The split `train` is for training. The split `validation` (or test) is held out.
    Without such a split, 5 % of the rows are held out, by the hash of their numbers. With fewer than 20 rows, the last
    5 % of each text are held out. Raises UserError "hf" or "text-field".
    """
    name = f"hf:{argument}"
    train, valid = train_and_valid(argument)
    # A set without rows still has columns, by which its form is recognized.
    first = {**dict.fromkeys(train.column_names), **(train[0] if len(train) else {})}
    if problem := refused_record(first, run.text_field, name):
        raise UserError(problem)
    if form := form_of(first, run.text_field):
        return ChatSource(records=HfSet(name=name, train=train, valid=valid, what=form.title), form=form)
    if run.text_field not in train.column_names:
        message = f"--data {name} has no column {run.text_field!r}; it has {', '.join(train.column_names)}"
        hint = field_hint(first, run.text_field)
        raise UserError(Problem(kind="text-field", message=message, hint=hint, where="--text-field"))
    return HfSource(name=name, train=train, valid=valid, what=run.text_field)


def train_and_valid(argument: str) -> tuple[Dataset, Dataset | None]:
    """Return the training split, and the validation split or None. Raises UserError "hf"."""
    splits = cast("dict[str, Dataset]", load_splits(argument))
    if "train" not in splits:
        message = f"--data hf:{argument} has no split 'train'; it has {', '.join(splits)}"
        raise data_error("hf", message, "add a split 'train', or use --data jsonl:GLOB")
    return splits["train"], next((splits[word] for word in VALID_SPLITS if word in splits), None)


# A folder can be a set saved by `datasets` (one split or several), or files that `datasets` reads by their suffix.
def load_splits(argument: str, streaming: bool = False) -> DatasetDict | IterableDatasetDict | dict[Any, Any]:
    """Open the splits of NAME, NAME:CONFIG or a file. Raises UserError "hf"."""
    import datasets.config

    name, _, config_name = argument.partition(":")
    config = config_name or None
    datasets.disable_progress_bars()  # every rank opens the data; zerofit shows its own progress
    path = Path(name).expanduser()
    try:
        if (path / "dataset_dict.json").is_file():
            saved: Any = datasets.DatasetDict.load_from_disk(str(path))
            return {key: split.to_iterable_dataset() for key, split in saved.items()} if streaming else saved
        if (path / "state.json").is_file():
            alone: Any = datasets.load_from_disk(str(path))
            return {"train": alone.to_iterable_dataset() if streaming else alone}
        if path.is_dir():
            return datasets.load_dataset(str(path), config, streaming=streaming)
        if path.is_file():
            suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
            builder = _BUILDERS.get(suffix, "json")
            options: dict[str, Any] = {"sep": delimiter_of(path)} if builder == "csv" else {}
            return datasets.load_dataset(builder, data_files={"train": str(path)}, streaming=streaming, **options)
        with hub_if_reachable(datasets.config):
            return datasets.load_dataset(name, config, streaming=streaming)
    except Exception as error:  # the hub client, pyarrow and fsspec raise many unrelated types
        message = f"cannot open --data hf:{name}: {reason_of(error)}"
        hint = "use a public data set on the hub (needs a network), or a local folder with parquet, jsonl or txt files"
        raise data_error("hf", message, hint) from error


@dataclass(frozen=True, kw_only=True)
class HfSet(RecordSource):
    """Rows of a `datasets.Dataset`; only the column `what` is read."""

    name: str
    train: Dataset
    valid: Dataset | None
    what: str  # name of a column, or a format of conversations

    def fingerprint(self) -> str:
        """Return the library's fingerprint, which covers files and processing."""
        valid = self.valid._fingerprint if self.valid is not None else ""
        return text_digest(self.train._fingerprint, valid, self.what)

    def survey(self, progress: Reporter) -> Survey:
        """Return the fingerprint and the number of rows."""
        return Survey(self.fingerprint(), len(self.train))  # a hash of the content would need to read all rows

    def records(self, documents: int) -> Iterator[PlacedRecord]:
        """See RecordSource.records; without a split for validation, 5 % of the rows are held out."""
        limit = held_out_hash(map(str, range(documents)), documents, whole_documents=True) if self.valid is None else -1
        for label, split in (("train", self.train), ("validation", self.valid)):
            rows: Any = split if split is not None else ()  # typed as an iterator of any values
            for number, row in enumerate(rows):
                held_out = split is self.valid or name_hash(str(number)) <= limit
                values = {name: _without_nulls(value) for name, value in row.items()}
                yield PlacedRecord(values, f"{self.name}: {label}[{number}]", held_out)

    def class_names(self, field: str) -> tuple[str, ...]:
        """See RecordSource.class_names; the names of a ClassLabel, or of a list of them."""
        feature: object = self.train.features.get(field)
        feature = getattr(feature, "feature", feature)
        return tuple(getattr(feature, "names", None) or ())


@dataclass(frozen=True, kw_only=True)
class HfSource(HfSet, TextSource):
    """Rows with a text in one column."""

    def pieces(self, documents: int) -> Iterator[TextPiece | Problem]:
        """See TextSource.pieces; reports rows whose field is not a string."""
        limit = held_out_hash(map(str, range(documents)), documents) if self.valid is None else 0
        for label, split in (("train", self.train), ("validation", self.valid)):
            for row, text in enumerate(self._texts(split)):
                if not isinstance(text, str):
                    where = f"{self.name}: {label}[{row}]"
                    message = f"{where}: {self.what!r} is {type(text).__name__}, not a string"
                    hint = "set --text-field to another column"
                    yield Problem(kind="text-field", message=message, hint=hint, where=where)
                elif self.valid is None:
                    yield from split_text(str(row), text, limit)
                else:
                    yield TextPiece(text, split is self.valid, True)

    def _texts(self, split: Dataset | None) -> Iterator[object]:
        """Yield the value of each row, without decoding other columns."""
        batches: Any = split.select_columns([self.what]).iter(batch_size=ROWS) if split is not None else ()
        return (text for batch in batches for text in batch[self.what])


# Arrow has one schema for all rows, so each object of a list has the fields of all the others. A message without tool
# calls gets "tool_calls": None, which templates would read.
def _without_nulls(value: object) -> object:
    """Return a value without the null fields of its objects."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
