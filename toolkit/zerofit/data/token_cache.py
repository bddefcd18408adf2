"""Tokens on disk: made once by one process, then memory-mapped by all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerofit.data.base import without_problems
from zerofit.data.cache import Preparation
from zerofit.data.text_sources import TextPiece, TextSource
from zerofit.data.tokenizer import Tokenizer
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_text

FORMAT = "tokens-3"  # increase it if files or split rules change; old caches are then not used
SPLITS = ("train", "valid")  # by whether a piece is held out
BATCH_CHARACTERS, BATCH_PIECES = 1 << 20, 1024


class TokenFile:
    """Token ids in a file, mapped on first use; a pickle contains only the path."""

    def __init__(self, path: Path, dtype: str):
        self.path, self.dtype = path, dtype
        self._array: np.ndarray | None = None

    def __reduce__(self):  # a loader process maps the file itself
        return TokenFile, (self.path, self.dtype)

    def array(self) -> np.ndarray:
        """Return all ids, uint16 or uint32 (tokens,), read-only."""
        if self._array is None:
            empty = not self.path.stat().st_size  # an empty file cannot be mapped
            self._array = np.empty(0, self.dtype) if empty else np.memmap(self.path, dtype=self.dtype, mode="r")
        return self._array


class SplitWriter:
    """Writes the files SPLIT.PART of both splits, sample by sample; each has one type of numbers."""

    def __init__(self, folder: Path, dtypes: Mapping[str, str], starts: Sequence[str] = ()):
        """Open the files. `dtypes`: the type of each part's numbers.

        `starts`: the parts that contain offsets: the start of each sample, and after them the end of the last sample.
        """
        self._dtypes = dtypes
        self._files = {(split, part): (folder / f"{split}.{part}").open("wb") for split in SPLITS for part in dtypes}
        self._ends = {(split, part): 0 for split in SPLITS for part in starts}
        for split, part in self._ends:
            self.put(split, part, np.zeros(1))  # where the first sample starts

    def put(self, split: str, part: str, values: np.ndarray) -> None:
        """Append numbers to a part."""
        self._files[split, part].write(values.astype(self._dtypes[part]).data)

    def end(self, split: str, starts: str, count: int) -> None:
        """End a sample of `count` numbers."""
        self._ends[split, starts] += count
        self.put(split, starts, np.array([self._ends[split, starts]]))

    def close(self) -> None:
        """Flush all files to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def write_meta(folder: Path, facts: dict[str, object]) -> None:
    """Write meta.json, with the sizes of the other files in the folder."""
    # the file that `read_meta` looks for is written last, when the sizes of all others are final
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_text(folder / "meta.json", json.dumps({**facts, "sizes": sizes}))


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a complete folder; None if it is missing or incomplete."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        complete = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return meta if complete else None


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenized source."""

    train: TokenFile
    valid: TokenFile
    counts: dict[str, int]  # tokens per split
    unigram_entropy_nats: float  # see Data.unigram_entropy_nats


def open_tokens(source: TextSource, tokenizer: Tokenizer, progress: Reporter) -> Tokens:
    """Return the tokens of a source, which are written if not cached.

    Raises UserError with up to 20 bad documents, and the errors of `Preparation.open`.
    """

    def write(staging: Path, documents: int) -> None:
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        writer = SplitWriter(staging, {"ids": dtype})
        unigrams = np.zeros((len(SPLITS), tokenizer.vocab_size), dtype=np.int64)
        with progress.task(f"{source.name}: tokenizing", source.size_bytes(), "bytes") as task:
            for batch in _batches(without_problems(source.pieces(documents))):
                encoded = tokenizer.encode_all([piece.text for piece in batch])
                for piece, ids in zip(batch, encoded, strict=True):
                    tokens = np.append(ids.astype(dtype), np.array([tokenizer.eod_id] * piece.ends, dtype=dtype))
                    unigrams[int(piece.held_out)] += np.bincount(tokens, minlength=tokenizer.vocab_size)
                    writer.put(SPLITS[piece.held_out], "ids", tokens)
                task.advance(sum(len(piece.text.encode()) for piece in batch))
        # `close` flushes the files, so it comes before meta.json, which marks the folder as complete.
        writer.close()
        meta = {"format": FORMAT, "source": source.name, "tokenizer": tokenizer.name, "documents": documents}
        write_meta(staging, {**meta, "dtype": dtype, "unigrams": dict(zip(SPLITS, unigrams.tolist(), strict=True))})

    identity = (tokenizer.identity, FORMAT)
    return Preparation(source=source, identity=identity, write=write, read=_read).open(progress)


def _batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield batches large enough for the tokenizer's threads and small enough for memory."""
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read(folder: Path) -> Tokens | None:
    """Return the tokens of a complete folder; None if it is missing or incomplete."""
    if (meta := read_meta(folder)) is None:
        return None
    train, valid = (np.array(meta["unigrams"][split]) for split in SPLITS)
    # Without the added 1, a token that only the validation text has would have the probability 0.
    logs = np.log((train + 1) / (train.sum() + len(train)))  # ln p of each token by add-one smoothed frequencies
    files = {split: TokenFile(folder / f"{split}.ids", meta["dtype"]) for split in SPLITS}
    return Tokens(
        **files,
        counts={"train": int(train.sum()), "valid": int(valid.sum())},
        unigram_entropy_nats=float(-(valid * logs).sum() / max(valid.sum(), 1)),
    )
