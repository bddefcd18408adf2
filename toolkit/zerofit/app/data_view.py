"""Show data as a model receives it: tokens of samples, and which of them it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict, Unpack

from zerofit.data.base import Data
from zerofit.data.chats import ChatRows
from zerofit.data.opening import kind_of_file, open_data, split_name
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, IGNORE_INDEX
from zerofit.spec.run import Run


class DataViewOptions(TypedDict, total=False):
    """Fields of Run that decide how text becomes samples."""

    text_field: str | None
    tokenizer: str | None
    chat_template: Path | None
    packing: bool | None
    seq_len: int | None


@dataclass(frozen=True, kw_only=True)
class SeenText:
    """Consecutive tokens that are either all learned or all not learned."""

    text: str
    ids: tuple[int, ...]
    learned: bool  # the model is trained to predict them


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """One sample, split into its documents."""

    documents: tuple[tuple[SeenText, ...], ...]  # no attention between documents
    padding: int  # padding tokens at the end


@dataclass(frozen=True, kw_only=True)
class DataView:
    """A data set and its first samples."""

    data: str
    seq_len: int  # tokens per sample
    notes: tuple[str, ...]
    counts: Mapping[str, int]  # counts of used, truncated and dropped conversations; empty for plain text
    train_samples: int
    valid_samples: int
    samples: tuple[SampleView, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit data --json` prints."""
        return asdict(self)


def look_at_data(
    path: str | Path, *, show: int = 3, on_event: OnEvent | None = None, **options: Unpack[DataViewOptions]
) -> DataView:
    """Return the first `show` samples of text as a causal language model gets them in training.

    `path`: a value of `--data`, or a file of text or JSON lines. Other keyword arguments: see DataViewOptions.

    >>> import zerofit as zf
    >>> lines = '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}\\n' * 2
    >>> Path("chats.jsonl").write_text(lines) > 0
    True
    >>> sample, = zf.look_at_data("chats.jsonl", show=1, seq_len=64).samples
    >>> [seen.text for seen in sample.documents[0]]
    ['<|user|>\\n2 + 2?<|end|>\\n<|assistant|>\\n', '4<|end|>\\n']

    Raises UserError with all problems of the data.
    """
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    run = Run(data=_data_value(str(path)), **fields)
    seq_len = run.seq_len or DEFAULT_SEQ_LEN
    data = open_data(run, "causal-lm", seq_len, Reporter(on_event))
    count = min(show, len(data.train))
    return DataView(
        data=data.name,
        seq_len=seq_len,
        notes=data.notes,
        counts=data.counts,
        train_samples=len(data.train),
        valid_samples=len(data.valid),
        samples=tuple(_view_of_sample(data, index, seq_len) for index in range(count)),
    )


def _data_value(path: str) -> str:
    """Return the value of `--data` for a path: KIND:PATH for a file.

    Raises UserError if it is neither a file nor a name.
    """
    file = Path(path).expanduser()
    if file.is_file():
        kind = {"csv": "hf", "npy": "text"}.get(kind := kind_of_file(file), kind)  # a table of numbers has no text
        return f"{kind}:{path}"
    split_name(path)
    return path


def _view_of_sample(data: Data, index: int, seq_len: int) -> SampleView:
    batch = data.train.batch([index], [0])
    inputs, labels = batch["inputs"][0].tolist(), batch["labels"][0].tolist()
    # Several conversations can be in one sample. Other text is cut into samples of equal length.
    lengths = data.train.lengths(index) if isinstance(data.train, ChatRows) else [seq_len]
    documents, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        documents.append(_document(data, inputs[part], labels[part]))
        start += length
    return SampleView(documents=tuple(documents), padding=seq_len - start)


def _document(data: Data, inputs: Sequence[int], labels: Sequence[int]) -> tuple[SeenText, ...]:
    """Split a document into parts whose tokens are either all learned or all not learned."""
    if data.decode is None:
        message = f"{data.name} has no text to show"
        raise UserError(Problem(kind="data-task", message=message, hint="use text or conversations", where="PATH"))
    # Labels are the inputs, shifted by one token. So the first token is never learned, and the last label comes after
    # the last input. If it is not learned, it is left out, since it is not an input either.
    learned = [False, *(label != IGNORE_INDEX for label in labels)]
    ids = [*inputs, labels[-1]] if learned[-1] else list(inputs)
    parts = []
    for is_learned, pairs in groupby(zip(ids, learned, strict=False), key=lambda pair: pair[1]):
        tokens = tuple(token for token, _ in pairs)
        parts.append(SeenText(text=data.decode(list(tokens)), ids=tokens, learned=is_learned))
    return tuple(parts)
