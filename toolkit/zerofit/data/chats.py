"""Samples of conversations: packed into rows without attention between them, or one per row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from zerofit.data.base import Data, Dataset, Integers, data_error, without_problems
from zerofit.data.cache import Preparation
from zerofit.data.chat_template import COPY_IT, ChatTemplate, EncodedChat, open_chat_template
from zerofit.data.text_sources import ChatPiece, ChatSource
from zerofit.data.token_cache import SPLITS, SplitWriter, TokenFile, read_meta, write_meta
from zerofit.data.tokenizer import Tokenizer
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run import Run

FORMAT = "chats-3"  # increase it if files, split rules or the fields read from records change
AT_ONCE = 1024  # conversations per batch, for the tokenizer's threads
PARTS = ("ids", "targets", "starts")
BLOCK = 1 << 22  # tokens whose targets are counted at a time


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """The conversations of one split, one after the other."""

    ids: TokenFile  # uint16 or uint32 (tokens,)
    targets: TokenFile  # bool (tokens,): written by the assistant
    starts: TokenFile  # int64 (conversations + 1,): where each conversation begins, and where the last one ends
    unused: dict[str, int]  # fields of records without effect -> number of conversations that have them


# A row of two packed conversations, of 5 and 3 tokens, with 2 padding tokens:
#
#     inputs      a0 a1 a2 a3 | b0 b1 | pad pad
#     positions    0  1  2  3 |  0  1 |   0   1
#     labels       -  - a3 a4 |  - b2 |   -   -      only what the assistant writes; "-" is -100
#
# Positions that restart separate the conversations: transformers builds block masks from them.
@dataclass(frozen=True, kw_only=True)
class ChatRows(Dataset):
    """Rows of conversations; labels are the assistant's next tokens.

    A conversation of n tokens takes n - 1 positions, since its last token is only a label. The rest of a row is padding
    and counts as a separate document.
    """

    draws = False

    tokens: ChatTokens
    seq_len: int  # L
    pad_id: int
    documents: np.ndarray  # int64: conversations, row by row
    ends: np.ndarray  # int64 (rows,): where the conversations of each row end in `documents`
    row_targets: np.ndarray  # int64 (rows,): labels of each row that count
    packed: bool  # whether batches have the position of each token in its conversation

    def __len__(self) -> int:
        return len(self.ends)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """Return "inputs", "labels" and, if packed, "position_ids", each int64 (batch, seq_len).

        `keys` are unused.
        """
        import torch

        shape = (len(indices), self.seq_len)
        inputs, labels = np.full(shape, self.pad_id), np.full(shape, IGNORE_INDEX)
        positions = np.zeros(shape, dtype=np.int64)
        for sample, row in enumerate(np.asarray(indices)):
            start = 0
            for document in self.row(int(row)):
                ids, targets = self._conversation(int(document))
                part = slice(start, start + len(ids) - 1)
                inputs[sample, part] = ids[:-1]
                labels[sample, part] = np.where(targets[1:], ids[1:], IGNORE_INDEX)
                positions[sample, part] = np.arange(len(ids) - 1)
                start = part.stop
            # Positions restart, so that the padding is a document of its own.
            positions[sample, start:] = np.arange(self.seq_len - start)
        arrays = {"inputs": inputs, "position_ids": positions, "labels": labels}
        if not self.packed:
            del arrays["position_ids"]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def row(self, index: int) -> np.ndarray:
        """Return the indices of the conversations in a row."""
        return self.documents[self.ends[index - 1] if index else 0 : self.ends[index]]

    def lengths(self, index: int) -> list[int]:
        """Return the number of positions that each conversation of a row takes."""
        return [len(self._conversation(int(document))[0]) - 1 for document in self.row(index)]

    def targets(self, indices: Integers) -> int:
        """Count the assistant's tokens in these rows."""
        return int(self.row_targets[np.asarray(indices, dtype=np.int64)].sum())

    def _conversation(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation's ids, int64, and targets, cut off after seq_len + 1 tokens."""
        start, stop = self.tokens.starts.array()[number : number + 2]
        part = slice(start, min(stop, start + self.seq_len + 1))
        return self.tokens.ids.array()[part].astype(np.int64), self.tokens.targets.array()[part]


@dataclass(frozen=True, kw_only=True)
class ChatCounts:
    """Counts of a split's conversations: used, truncated and dropped."""

    conversations: int
    truncated: int  # longer than a sample, so cut off
    dropped: int  # left out: no tokens of the assistant after truncation
    rows: int
    tokens: int  # positions of the rows without padding
    targets: int  # labels that count


def make_rows(tokens: ChatTokens, seq_len: int, pad_id: int, packed: bool) -> tuple[ChatRows, ChatCounts]:
    """Return the samples of a split, and the counts of its conversations."""
    starts = tokens.starts.array()
    lengths = np.maximum(np.diff(starts) - 1, 0)  # positions
    used = np.minimum(lengths, seq_len)
    targets = _count_targets(tokens.targets.array(), starts[:-1] + 1, used)
    # A conversation without a target teaches nothing, but would take up space in a row.
    learnable = np.flatnonzero(targets)
    rows = pack(used[learnable], seq_len) if packed else [[n] for n in range(len(learnable))]
    documents = learnable[np.array([n for row in rows for n in row], dtype=np.int64)]
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    row_targets = np.array([targets[learnable[row]].sum() for row in rows], dtype=np.int64)
    counts = ChatCounts(
        conversations=len(lengths),
        truncated=int((lengths[learnable] > seq_len).sum()),
        dropped=len(lengths) - len(learnable),
        rows=len(rows),
        tokens=int(used[learnable].sum()),
        targets=int(targets.sum()),
    )
    layout = {"documents": documents, "ends": ends, "row_targets": row_targets}
    return ChatRows(tokens=tokens, seq_len=seq_len, pad_id=pad_id, packed=packed, **layout), counts


# Rows are kept by their free space, and the sizes of free space in order. So each conversation finds the fullest row
# into which it fits by bisection: n log n for n conversations, where a search over all rows would take n^2.
def pack(lengths: Sequence[int] | np.ndarray, size: int) -> list[list[int]]:
    """Divide conversations into rows of at most `size` tokens; return each row's conversations.

    Best-fit decreasing: the longest conversation comes first, and each goes into the fullest row with enough space.
    The result has at most 11/9 of the smallest possible number of rows.
    """
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}  # remaining space -> rows
    spaces: list[int] = []  # its keys that have rows, in order, without 0
    for number in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[number])
        fullest = bisect_left(spaces, length)
        if fullest < len(spaces):
            space = spaces[fullest]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces.pop(fullest)
        else:
            space, row = size, len(rows)
            rows.append([])
        rows[row].append(number)
        remaining = space - length
        if not rows_by_space.setdefault(remaining, []) and remaining:
            insort(spaces, remaining)
        rows_by_space[remaining].append(row)
    return rows


# Cumulative sums need 8 bytes per token, so they are computed for one block of conversations at a time.
def _count_targets(targets: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of targets in each part, int64 (parts,). `starts` must be in order."""
    counts = np.zeros(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):  # parts first to past - 1 are a block
        offset = int(starts[first])
        past = max(first + 1, int(np.searchsorted(starts, offset + BLOCK)))
        sums = np.concatenate([[0], np.cumsum(targets[offset : int(starts[past - 1] + lengths[past - 1])])])
        begin = np.minimum(starts[first:past] - offset, len(sums) - 1)  # an empty conversation may be at the end
        counts[first:past] = sums[begin + lengths[first:past]] - sums[begin]
        first = past
    return counts


def open_chats(source: ChatSource, tokenizer: Tokenizer, run: Run, seq_len: int, progress: Reporter) -> Data:
    """Open conversations as samples of `seq_len` tokens. Raises UserError if there are none."""
    template = open_chat_template(run.chat_template, tokenizer)
    splits = open_chat_tokens(source, template, progress)
    rows = {name: make_rows(tokens, seq_len, tokenizer.eod_id, run.packing) for name, tokens in splits.items()}
    (train, counts), (valid, held_out) = rows["train"], rows["valid"]
    if not len(train) or not len(valid):
        message = f"{source.records.name} has {len(train):,} training and {len(valid):,} validation samples with an "
        message += f"assistant's answer within {seq_len:,} tokens; each split needs at least one"
        hint = "use at least two conversations, or a larger --seq-len"
        if counts.conversations + held_out.conversations == 1:
            message = f"{source.records.name} has one conversation; training and validation need one each"
            hint = "use at least two conversations"
        elif not any(tokens.targets.array().any() for tokens in splits.values()):
            message = f"{source.records.name} has no assistant's message to learn"
            hint = "each conversation needs a message of the role assistant that is not empty and has not the weight 0"
        raise data_error("data-too-short", message, hint)
    return Data(
        name=source.records.name,
        train=train,
        valid=valid,
        inputs=TextInputs(vocab_size=tokenizer.vocab_size, seq_len=seq_len, packed=run.packing),
        decode=tokenizer.decode,
        notes=tuple(_notes(source, template, counts, held_out, train)),
        counts={**vars(counts), "validation_conversations": held_out.conversations},
    )


def open_chat_tokens(source: ChatSource, template: ChatTemplate, progress: Reporter) -> dict[str, ChatTokens]:
    """Return the tokens of a source's conversations by split, and cache them.

    Raises UserError with up to 20 bad records: no conversation, or the assistant's text cannot be found. Also raises
    the errors of `Preparation.open`.
    """
    ids = "uint16" if template.tokenizer.vocab_size <= 1 << 16 else "uint32"
    dtypes: dict[str, str] = dict(zip(PARTS, (ids, "bool", "int64"), strict=True))

    def write(staging: Path, documents: int) -> None:
        writer = SplitWriter(staging, dtypes, ("starts",))
        unused: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        with progress.task(f"{source.records.name}: tokenizing", documents, "conversations") as task:
            for piece, chat in without_problems(_encoded(source, template, documents)):
                split = SPLITS[piece.held_out]
                writer.put(split, "ids", chat.ids)
                writer.put(split, "targets", chat.targets)
                writer.end(split, "starts", len(chat.ids))
                unused[split].update(chat.unused)
                task.advance()
        writer.close()
        meta = {"format": FORMAT, "source": source.records.name, "tokenizer": template.tokenizer.name}
        write_meta(staging, {**meta, "unused": unused, "dtypes": dict.fromkeys(SPLITS, dtypes)})

    identity = (template.identity, FORMAT)
    return Preparation(source=source.records, identity=identity, write=write, read=_read).open(progress)


def _encoded(
    source: ChatSource, template: ChatTemplate, documents: int
) -> Iterator[tuple[ChatPiece, EncodedChat] | Problem]:
    """Yield all conversations with their tokens, and a problem for each bad record."""
    remaining = source.pieces(documents)
    while block := list(islice(remaining, AT_ONCE)):
        yield from (item for item in block if isinstance(item, Problem))
        pieces = [item for item in block if isinstance(item, ChatPiece)]
        for piece, chat in zip(pieces, template.encode_all([item.conversation for item in pieces]), strict=True):
            if isinstance(chat, EncodedChat):
                yield piece, chat
            else:
                message = f"{piece.where}: {chat}"
                yield Problem(kind="chat-template", message=message, hint=COPY_IT, where=piece.where)


def _read(folder: Path) -> dict[str, ChatTokens] | None:
    """Return the tokens of a complete folder; None if it is missing or incomplete."""
    meta = read_meta(folder)
    return meta and {
        split: ChatTokens(
            **{part: TokenFile(folder / f"{split}.{part}", dtypes[part]) for part in PARTS},
            unused=meta["unused"][split],
        )
        for split, dtypes in meta["dtypes"].items()
    }


def _notes(
    source: ChatSource, template: ChatTemplate, counts: ChatCounts, held_out: ChatCounts, train: ChatRows
) -> list[str]:
    """Return what the user should know of the conversations, their template and their samples."""
    marks = "marks the assistant's turns"
    if not template.marked:
        marks = "does not mark the assistant's turns: zerofit finds them"
    positions = counts.rows * train.seq_len
    fill = f"{counts.tokens / positions:.0%} full, {counts.targets / counts.tokens:.0%} of the tokens count in the loss"
    notes = [
        f"{source.records.name}: conversations in the {source.form.title} form, {counts.conversations:,} to train on "
        f"and {held_out.conversations:,} to validate",
        f"{template.origin}, which {marks}",
        ("packed into" if train.packed else "one conversation in each of")
        + f" {counts.rows:,} samples of {train.seq_len:,} tokens, {fill}",
    ]
    if template.missing:
        tokens = ", ".join(template.missing)
        notes.append(f"{tokens}: not in the tokenizer of {template.tokenizer.name}, which splits each into several")
    if counts.truncated:
        notes.append(f"{counts.truncated:,} conversations are longer than a sample and are cut off")
    if counts.dropped:
        notes.append(f"{counts.dropped:,} conversations are left out: no assistant message fits into a sample")
    if unused := train.tokens.unused:
        fields = ", ".join(f"{name} ({count:,} conversations)" for name, count in sorted(unused.items()))
        notes.append(f"training ignores these fields of the records: {fields}")
    return notes
