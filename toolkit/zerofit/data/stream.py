"""Streamed text from a set larger than the disk, a block of tokens at a time.

The first process that needs a block tokenizes it into the cache. The oldest blocks are deleted. The position of the
stream before each block is stored with the block, so a resumed run continues there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np

from zerofit.data.base import Data, Dataset, Integers, data_error
from zerofit.data.cache import cache_errors, waiting_lock
from zerofit.data.hashing import text_digest
from zerofit.data.hf import VALID_SPLITS, load_splits
from zerofit.data.text import CausalText
from zerofit.data.token_cache import TokenFile
from zerofit.data.tokenizer import Tokenizer, open_tokenizer
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write, cache_root, write_json
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from datasets import IterableDataset

FORMAT = "stream-2"  # increase it if the format of the files changes
BLOCK_TOKENS = 1 << 22
VALID_WINDOWS = 256
KEPT = 3  # blocks on the disk
AT_ONCE = 256  # documents per batch, for the tokenizer's threads
ENDLESS = 1 << 62  # samples


class _Position(TypedDict):
    """A position in a stream, as in files."""

    rows: dict | None  # the set's state before a read of rows; None: at the beginning
    tokens: int  # tokens used from that read


class _Reader:
    """Reads the tokens of a streamed split. If `endless`, the first row follows the last row."""

    def __init__(self, stream: TokenStream, split: str, position: _Position, *, endless: bool = True):
        self._stream, self._split, self._endless = stream, split, endless
        self._tokenizer = open_tokenizer(stream.tokenizer)
        self._set, self._state = self._opened(), position["rows"]
        if self._state is not None:
            self._set.load_state_dict(self._state)
        self._texts = self._rows()
        self._chunk = np.zeros(0, np.uint32)  # the tokens of the last read
        self._used = 0  # how many of them are used
        self._begun = False
        # A read can only be repeated as a whole, so its first tokens, which were used before, are skipped.
        if position["tokens"]:
            self._read()
            self._used = position["tokens"]

    @property
    def position(self) -> _Position:
        """The position of the next token."""
        return {"rows": self._state, "tokens": self._used}

    def take(self, tokens: int) -> np.ndarray:
        """Return the next tokens, uint32 (tokens,); fewer at the end of a split that is not endless."""
        parts, count = [], 0
        while count < tokens:
            if self._used == len(self._chunk) and not self._read():
                break
            part = self._chunk[self._used : self._used + tokens - count]
            parts.append(part)
            count += len(part)
            self._used += len(part)
        return np.concatenate(parts)

    def _read(self) -> bool:
        """Read and tokenize some rows. Return False if there are none."""
        if self._begun:  # at the start the set's state is unknown before reading
            self._state = self._set.state_dict()
        self._begun, self._used = True, 0
        end = np.uint32(self._tokenizer.eod_id)
        encoded = self._tokenizer.encode_all(list(islice(self._texts, AT_ONCE)))
        self._chunk = np.concatenate([self._chunk[:0], *(np.append(ids.astype(np.uint32), end) for ids in encoded)])
        return len(encoded) > 0

    def _opened(self) -> IterableDataset:
        rows = cast("IterableDataset", load_splits(self._stream.name, streaming=True)[self._split])
        return rows.select_columns([self._stream.column])

    def _rows(self) -> Iterator[str]:
        """Yield the texts of the split's rows. Raises UserError."""
        name, column = self._stream.name, self._stream.column
        for passes in count():  # a resumed stream may be at its end; its first pass then has no rows
            empty = True
            for row in self._set:
                empty = False
                if not isinstance(row[column], str):
                    message = f"--data hf:{name}: {column!r} is {type(row[column]).__name__} in a row, not a string"
                    hint = "set --text-field to another column"
                    raise UserError(Problem(kind="text-field", message=message, hint=hint, where="--text-field"))
                yield row[column]
            if empty and (passes or not self._endless):
                raise data_error("empty-data", f"--data hf:{name} has no rows in {self._split}")
            if not self._endless:
                return
            self._set = self._opened()


# The cache of a stream; the newest three blocks are on the disk:
#
#     valid.bin        validation tokens
#     before-7.json    where the stream is before block 7, and the token with which the block starts
#     block-7.bin      1 + block_tokens tokens; the first is the last token of block 6, since labels are shifted by one
#
# Any block can be made from the nearest earlier before-N.json, so a resumed run needs no block of the old one.
@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Blocks of tokens of a streamed set; each starts with the last token of the previous one."""

    folder: Path  # cache folder for this set, column, tokenizer and block size
    name: str
    column: str
    tokenizer: str
    block_tokens: int
    valid_tokens: int

    def block(self, number: int) -> TokenFile:
        """Return a block's tokens; a missing block is made, with the earlier ones that it needs."""
        path = self.folder / f"block-{number}.bin"
        with cache_errors(f"hf:{self.name}"):
            if not path.is_file():
                with self._alone():
                    if not path.is_file():
                        self._make(number)
        return TokenFile(path, "uint32")

    def begin(self, valid_split: str | None) -> TokenFile:
        """Return the validation tokens: at most `valid_tokens` tokens of `valid_split`.

        Without a `valid_split` they are the first tokens of the training split, and training skips them.
        """
        path = self.folder / "valid.bin"
        beginning: _Position = {"rows": None, "tokens": 0}
        with cache_errors(f"hf:{self.name}"), self._alone():
            if not self._before(0).is_file():
                reader = _Reader(self, valid_split or "train", beginning, endless=False)
                tokens = reader.take(self.valid_tokens)
                if len(tokens) < self.valid_tokens and valid_split is None:
                    message = f"--data hf:{self.name} has fewer than the {self.valid_tokens:,} tokens a stream needs "
                    message += "for validation"
                    raise UserError(Problem(kind="data-too-short", message=message, hint="remove --stream"))
                self._write(path, tokens)
                self._write_position(0, beginning if valid_split else reader.position, int(tokens[-1]))
        return TokenFile(path, "uint32")

    def _make(self, number: int) -> None:
        """Write this block, and earlier blocks whose position is unknown; delete the oldest blocks."""
        first = number
        while not self._before(first).is_file():
            first -= 1
        before = json.loads(self._before(first).read_text(encoding="utf-8"))
        # Blocks between the known position and this one are made, too, because reading has to pass them anyway.
        reader, last = _Reader(self, "train", before["place"]), before["last"]
        for block in range(first, number + 1):
            tokens = np.append(np.uint32(last), reader.take(self.block_tokens))
            last = int(tokens[-1])
            self._write(self.folder / f"block-{block}.bin", tokens)
            self._write_position(block + 1, reader.position, last)
            (self.folder / f"block-{block - KEPT}.bin").unlink(missing_ok=True)

    def _alone(self) -> AbstractContextManager[None]:
        return waiting_lock(self.folder / "lock", f"another process reads hf:{self.name}", Reporter())

    def _before(self, block: int) -> Path:
        return self.folder / f"before-{block}.json"

    def _write_position(self, block: int, position: _Position, last: int) -> None:
        """Write where the stream is before a block, and the last token of the previous block."""
        write_json(self._before(block), {"place": position, "last": last})

    def _write(self, path: Path, tokens: np.ndarray) -> None:
        with atomic_write(path) as file:
            file.write(tokens.astype(np.uint32).tobytes())


@dataclass(frozen=True, kw_only=True)
class StreamedText(Dataset):
    """Windows of an endless stream of blocks; a block has windows like a `CausalText`."""

    draws = False

    stream: TokenStream
    seq_len: int
    pad_id: int

    @property
    def ordered_in(self) -> int:
        """The number of windows in a block. Samples are shuffled within a block."""
        return self.stream.block_tokens // self.seq_len

    def __len__(self) -> int:
        return ENDLESS

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; `keys` are unused."""
        import torch

        blocks, windows = np.divmod(np.asarray(indices, dtype=np.int64), self.ordered_in)
        tokens, columns = self.stream.block_tokens + 1, dict[str, torch.Tensor]()
        for block in np.unique(blocks).tolist():  # most batches need one block
            of_block = np.flatnonzero(blocks == block)
            text = CausalText(file=self.stream.block(block), tokens=tokens, seq_len=self.seq_len, pad_id=self.pad_id)
            for name, rows in text.batch(windows[of_block], keys).items():
                columns.setdefault(name, torch.empty(len(blocks), self.seq_len, dtype=rows.dtype))[of_block] = rows
        return columns

    def targets(self, indices: Integers) -> int:
        """Count the windows' tokens."""
        return len(indices) * self.seq_len


def open_stream(run: Run, argument: str, tokenizer: Tokenizer, seq_len: int) -> Data:
    """Open the column `run.text_field` of a set as a stream. Raises UserError."""
    splits = load_splits(argument, streaming=True)
    columns = splits["train"].column_names if "train" in splits else None  # a stream's may be unknown
    if not columns or run.text_field not in columns:
        what = f"no column {run.text_field!r} in split 'train' (columns: {', '.join(columns or []) or 'unknown'})"
        what = what if "train" in splits else f"no split 'train' (splits: {', '.join(splits)})"
        hint = f"set --text-field: {nearest(run.text_field, columns or [])}"
        message = f"--data hf:{argument} has {what}"
        raise UserError(Problem(kind="text-field", message=message, hint=hint, where="--text-field"))
    # A block has complete windows only, so that no sample needs two blocks.
    windows = max(1, BLOCK_TOKENS // seq_len)
    key = text_digest(_content(argument), run.text_field, tokenizer.identity, FORMAT, str(windows), str(seq_len))
    stream = TokenStream(
        folder=cache_root() / "streams" / key,
        name=argument,
        column=run.text_field,
        tokenizer=run.tokenizer,
        block_tokens=windows * seq_len,
        valid_tokens=VALID_WINDOWS * seq_len + 1,
    )
    with cache_errors(f"hf:{argument}"):
        stream.folder.mkdir(parents=True, exist_ok=True)
    held_out = stream.begin(next((word for word in VALID_SPLITS if word in splits), None))
    valid = CausalText(file=held_out, tokens=len(held_out.array()), seq_len=seq_len, pad_id=tokenizer.eod_id)
    return Data(
        name=f"hf:{argument}",
        train=StreamedText(stream=stream, seq_len=seq_len, pad_id=tokenizer.eod_id),
        valid=valid,
        inputs=TextInputs(vocab_size=tokenizer.vocab_size, seq_len=seq_len),
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        notes=(f"streamed and shuffled {windows:,} samples at a time",),
    )


# The text of a set is too long to hash. On the hub, its name has to do.
def _content(argument: str) -> str:
    """Return the name of a set, for a local folder also its files' sizes and times."""
    folder = Path(argument.partition(":")[0]).expanduser()
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    facts = ((path, path.stat()) for path in files)
    return "\0".join([argument, *(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in facts)])
