"""Tokens of conversations on disk, with a mask of the assistant's; written once, mapped by all processes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from zerofit.data.chat_source import ChatPiece, ChatSource
from zerofit.data.chat_template import COPY_IT, ChatTemplate, EncodedChat
from zerofit.data.prepared import Preparation
from zerofit.data.text_sources import NAMED
from zerofit.data.token_cache import SPLITS, TokenFile
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_text

FORMAT = "chats-2"  # raise it when files, split rules or the fields read from records change
AT_ONCE = 1024  # conversations, for the tokenizer's threads
PARTS = ("ids", "targets", "starts")


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """The conversations of one split, one after the other."""

    ids: TokenFile  # uint16 or uint32 (tokens,)
    targets: TokenFile  # bool (tokens,): written by the assistant
    starts: TokenFile  # int64 (conversations + 1,): where each begins, and where the last one ends
    unused: dict[str, int]  # fields of records without effect, and in how many conversations


def open_chat_tokens(source: ChatSource, template: ChatTemplate, progress: Reporter) -> dict[str, ChatTokens]:
    """Open the tokens of a source's conversations by split: map the cached files, or write them first.

    Raises UserError with up to 20 records that are not conversations, or whose assistant's text cannot be found, and
    as `Preparation.open` does.
    """

    def write(staging: Path, documents: int) -> None:
        writers = {split: _ChatWriter(staging, split, template.tokenizer.vocab_size) for split in SPLITS}
        with progress.task(f"{source.name}: tokenizing", documents, "conversations") as task:
            for piece, chat in _encoded(source, template, documents):
                writers["valid" if piece.held_out else "train"].add(chat)
                task.advance()
        for writer in writers.values():
            writer.close()
        meta = {"format": FORMAT, "source": source.name, "tokenizer": template.tokenizer.name}
        unused = {split: writer.unused for split, writer in writers.items()}
        sizes = {path.name: path.stat().st_size for path in staging.iterdir()}
        dtypes = {split: writer.dtypes for split, writer in writers.items()}
        write_text(staging / "meta.json", json.dumps({**meta, "unused": unused, "sizes": sizes, "dtypes": dtypes}))

    identity = (template.identity, FORMAT)
    return Preparation(source=source, identity=identity, write=write, read=_read).open(progress)


def _encoded(source: ChatSource, template: ChatTemplate, documents: int) -> Iterator[tuple[ChatPiece, EncodedChat]]:
    """Yield all conversations with their tokens. Raises UserError with all problems, at the end or after the 20th."""
    problems: list[Problem] = []
    found = source.pieces(documents)
    while len(problems) < NAMED and (block := list(islice(found, AT_ONCE))):
        problems += [one for one in block if isinstance(one, Problem)]
        pieces = [one for one in block if isinstance(one, ChatPiece)]
        for piece, chat in zip(pieces, template.encode_all([one.conversation for one in pieces]), strict=True):
            if isinstance(chat, EncodedChat):
                yield piece, chat
                continue
            message = f"{piece.where}: {chat}"
            problems.append(Problem(kind="chat-template", message=message, hint=COPY_IT, where=piece.where))
    if problems:
        raise UserError(*problems[:NAMED])


class _ChatWriter:
    """The files of one split."""

    def __init__(self, folder: Path, split: str, vocab_size: int):
        ids = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.dtypes: dict[str, str] = dict(zip(PARTS, (ids, "bool", "int64"), strict=True))
        self._files = {part: (folder / f"{split}.{part}").open("wb") for part in PARTS}
        self.unused: Counter[str] = Counter()
        self._end = 0
        self._put("starts", np.zeros(1))

    def _put(self, part: str, values: np.ndarray) -> None:
        self._files[part].write(values.astype(self.dtypes[part]).data)

    def add(self, chat: EncodedChat) -> None:
        """Append a conversation."""
        self._end += len(chat.ids)
        self.unused.update(chat.unused)
        self._put("ids", chat.ids)
        self._put("targets", chat.targets)
        self._put("starts", np.array([self._end]))

    def close(self) -> None:
        """Flush everything to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _read(folder: Path) -> dict[str, ChatTokens] | None:
    """Return the tokens in a finished folder; None if there is none, or a file does not have its recorded size."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if any((folder / name).stat().st_size != size for name, size in meta["sizes"].items()):
            return None
        return {
            split: ChatTokens(
                **{part: TokenFile(folder / f"{split}.{part}", dtypes[part]) for part in PARTS},
                unused=meta["unused"][split],
            )
            for split, dtypes in meta["dtypes"].items()
        }
    except (OSError, ValueError, KeyError):
        return None
