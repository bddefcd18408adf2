"""Text from a data set of the Hugging Face hub, or from a folder that the `datasets` library can read.

The hub is not asked for half a minute when this machine cannot reach it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from zerofit.data.hashing import text_digest
from zerofit.data.text_sources import NAMED, Source, Survey, TextPiece, held_out_hash, split_text
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

VALID_SPLITS = ("validation", "valid", "dev", "test")
ROWS = 256  # read at a time
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@contextmanager
def hub_if_reachable(*clients: ModuleType) -> Iterator[None]:
    """Let hub clients use only what they have on the disk if the hub has no address on this machine.

    Left alone, they try each file five times and longer each time before they give up. `clients` are the modules
    that hold a flag HF_HUB_OFFLINE, besides huggingface_hub's own.
    """
    from huggingface_hub import constants

    with ExitStack() as changes:
        for module in () if _reachable(constants.ENDPOINT) else (constants, *clients):
            changes.enter_context(patch.object(module, "HF_HUB_OFFLINE", True))
        yield


@lru_cache
def _reachable(endpoint: str) -> bool:
    if any(os.environ.get(name) for name in _PROXIES):
        return True  # the proxy resolves the name
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def open_hf(run: Run, argument: str) -> Source:
    """Open NAME or NAME:CONFIG, one document per row, the column `run.text_field`. NAME may be a local folder.

    The split `train` is trained on; `validation` (or test) is held out where there is one, else 5 % of the rows by
    hash of the row number (with fewer than 20 rows: the last 5 % of each). Raises UserError "hf" or "text-field".
    """
    name, _, config = argument.partition(":")
    splits = _load(name, config or None)
    train = splits.get("train")
    if train is None:
        message = f"--data hf:{argument} has no split called train; it has {', '.join(splits)}"
        raise UserError(Problem(kind="hf", message=message, hint="prepare one, or --data jsonl:GLOB", where="--data"))
    if run.text_field not in train.column_names:
        message = f"--data hf:{argument} has no column {run.text_field!r}; it has {', '.join(train.column_names)}"
        hint = f"--text-field: {nearest(run.text_field, train.column_names)}"
        raise UserError(Problem(kind="text-field", message=message, hint=hint, where="--text-field"))
    valid = next((splits[word] for word in VALID_SPLITS if word in splits), None)
    return HfSource(name=f"hf:{argument}", train=train, valid=valid, field=run.text_field)


def _load(name: str, config: str | None) -> dict[Any, Any]:
    import datasets.config

    datasets.disable_progress_bars()  # every rank opens the data; ours shows what takes long
    path = Path(name).expanduser()
    try:
        if (path / "dataset_dict.json").is_file():
            return datasets.DatasetDict.load_from_disk(str(path))
        if (path / "state.json").is_file():
            return {"train": datasets.load_from_disk(str(path))}
        if path.is_dir():
            return datasets.load_dataset(str(path), config)
        with hub_if_reachable(datasets.config):
            return datasets.load_dataset(name, config)
    except Exception as error:  # the hub client, pyarrow and fsspec raise many unrelated types
        message = f"--data hf:{name} could not be opened: {' '.join(str(error).split())[:300]}"
        hint = "a public data set on the hub (needs a network), or a local folder with parquet, jsonl or txt files"
        raise UserError(Problem(kind="hf", message=message, hint=hint, where="--data")) from error


@dataclass(frozen=True, kw_only=True)
class HfSource(Source):
    """Rows of a `datasets.Dataset`."""

    name: str
    train: Any
    valid: Any | None
    field: str

    def fingerprint(self) -> str:
        """Return the library's own, of the files behind the data and all that was done to them."""
        valid = self.valid._fingerprint if self.valid is not None else ""
        return text_digest(self.train._fingerprint, valid, self.field)

    def survey(self, progress: Reporter) -> Survey:
        """Take the fingerprint for the content: reading it again would find nothing new."""
        return Survey(self.fingerprint(), len(self.train))

    def pieces(self, documents: int) -> Iterator[TextPiece]:
        """See Source.pieces; rows whose field is not a string are named."""
        problems: list[Problem] = []
        limit = held_out_hash(map(str, range(documents)), documents)
        for row, text in self._rows(self.train, "train", problems):
            whole = self.valid is not None
            yield from [TextPiece(text, False, True)] if whole else split_text(str(row), text, limit)
        for _, text in self._rows(self.valid, "validation", problems) if self.valid is not None else ():
            yield TextPiece(text, True, True)
        if problems:
            raise UserError(*problems)

    def _rows(self, split: Any, label: str, problems: list[Problem]) -> Iterator[tuple[int, str]]:
        row = -1
        for batch in split.select_columns([self.field]).iter(batch_size=ROWS):
            for text in batch[self.field]:
                row += 1
                if isinstance(text, str):
                    yield row, text
                    continue
                where = f"{self.name}: {label}[{row}]"
                message = f"{where}: {self.field!r} is {type(text).__name__}, need a string"
                hint = "--text-field names another column"
                problems.append(Problem(kind="text-field", message=message, hint=hint, where=where))
                if len(problems) >= NAMED:
                    raise UserError(*problems)
