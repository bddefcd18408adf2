"""Samples of labelled text: padded texts with a class, tags of the words or a target text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np

from zerofit.data.base import Data, Dataset, Integers, data_error, without_problems
from zerofit.data.cache import Preparation
from zerofit.data.labelled_rows import (
    EncodedLabelled,
    LabelledEncoder,
    LabelledFields,
    fields_of,
    open_rows,
    read_row,
)
from zerofit.data.table import MOST_CLASSES, is_fraction
from zerofit.data.text_sources import PlacedRecord, RecordSource
from zerofit.data.token_cache import SPLITS, SplitWriter, TokenFile, read_meta, write_meta
from zerofit.data.tokenizer import Tokenizer, open_tokenizer
from zerofit.models.inputs import Inputs, LabelledTextInputs, NamedInput, NamedInputs
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import IGNORE_INDEX, Task
from zerofit.spec.run import Run
from zerofit.spec.units import counted

if TYPE_CHECKING:
    import torch

FORMAT = "labelled-1"  # increase it if files or split rules change
AT_ONCE = 256  # rows per batch, for the tokenizer's threads
PARTS = {"ids": "uint32", "types": "bool", "labels": "int32", "starts": "int64", "label_starts": "int64"}
SHOWN = 10  # limit of class names in a message
MULTIPLE = 8  # batch widths are multiples of this, for fast kernels


class _Meta(TypedDict):
    """Facts in meta.json."""

    rows: dict[str, int]  # by split
    classes: list[str]  # by their number in the files
    cut: int  # texts that were truncated
    types: bool  # whether texts are pairs


@dataclass(frozen=True, kw_only=True)
class LabelledText(Dataset):
    """Row i is a text, padded at the end, with its labels. The loss ignores labels of -100."""

    draws = False

    files: dict[str, TokenFile]  # by PARTS
    task: Task
    seq_len: int
    target_len: int  # tokens of a target text
    pad_id: int
    order: np.ndarray | None  # int64: id of each class by its number in the files; None: the numbers are token ids
    pairs: bool

    def __len__(self) -> int:
        return len(self.files["starts"].array()) - 1

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """Return "inputs", "attention_mask", "token_type_ids" (pairs only) and "labels".

        All are int64 (batch, seq_len), but labels are (batch,) for classes and (batch, target_len) for target texts.
        `keys` are unused.
        """
        import torch

        shape = (len(indices), self.seq_len)
        arrays = {"inputs": np.full(shape, self.pad_id), "attention_mask": np.zeros(shape, dtype=np.int64)}
        if self.pairs:
            arrays["token_type_ids"] = np.zeros(shape, dtype=np.int64)
        width = {"classify": 1, "tag": self.seq_len}.get(self.task, self.target_len)
        labels = np.full((len(indices), width), IGNORE_INDEX)
        for sample, row in enumerate(np.asarray(indices)):
            ids, row_labels = self._part("ids", row), self._labels(row)
            arrays["inputs"][sample, : len(ids)] = ids
            arrays["attention_mask"][sample, : len(ids)] = 1
            if self.pairs:
                arrays["token_type_ids"][sample, : len(ids)] = self._part("types", row)
            labels[sample, : len(row_labels)] = row_labels
        arrays["labels"] = labels[:, 0] if self.task == "classify" else labels
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def targets(self, indices: Integers) -> int:
        """Count the labels that are not ignored by the loss."""
        if self.task == "classify":
            return len(indices)
        return sum(int((self._labels(row) != IGNORE_INDEX).sum()) for row in np.asarray(indices))

    def trimmed(self, batch: dict) -> dict:
        """Cut off columns that are padding in all samples, to a multiple of 8 tokens."""
        widths = {"labels": _width(batch["labels"] != IGNORE_INDEX)} if self.task == "seq2seq-lm" else {}
        text = ("inputs", "attention_mask", "token_type_ids", *(("labels",) if self.task == "tag" else ()))
        widths |= dict.fromkeys(text, _width(batch["attention_mask"] != 0))
        return {key: v[:, : widths[key]].contiguous() if key in widths else v for key, v in batch.items()}

    def _part(self, name: str, row: int) -> np.ndarray:
        """Return a row's numbers of a part, int64."""
        start, stop = self.files["label_starts" if name == "labels" else "starts"].array()[row : row + 2]
        return self.files[name].array()[start:stop].astype(np.int64)

    def _labels(self, row: int) -> np.ndarray:
        """Return a row's labels, int64: ids of classes or of tokens, and -100 where there is none."""
        numbers = self._part("labels", row)
        return numbers if self.order is None else np.where(numbers < 0, numbers, self.order[np.maximum(numbers, 0)])


# Texts of a batch are padded to the longest text, not to seq_len, since attention over padding takes time.
def _width(real: torch.Tensor) -> int:
    """Return the width of a batch, a multiple of 8. `real`: bool (batch, length), not padding."""
    columns = real.any(dim=0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 1
    return min(-(-last // MULTIPLE) * MULTIPLE, real.shape[1])


def open_labelled(name: str, run: Run, task: Task, seq_len: int, known: Sequence[str], progress: Reporter) -> Data:
    """Open labelled text as samples of at most `seq_len` tokens.

    Target texts have at most `run.target_len` tokens. `known`: the classes of an existing model. If they include all
    classes of the data, their order is kept. Raises UserError for bad rows (up to 20), and for too few or too many
    classes.
    """
    # The files have class numbers in the order of their first rows. `order` maps them to the ids of this model. So a
    # fine-tuned classifier with another order of classes can use the same files.
    source, tokenizer = open_rows(name), open_tokenizer(run.tokenizer)
    fields = fields_of(run, task, source)
    encoder = LabelledEncoder(tokenizer=tokenizer, task=task, length=seq_len, target_length=run.target_len or seq_len)
    meta, files = _open_files(source, fields, encoder, progress)
    if not meta["rows"]["train"] or not meta["rows"]["valid"]:
        message = f"{name} has {meta['rows']['train']} training rows and {meta['rows']['valid']} validation rows"
        raise data_error("data-too-short", message, "both need rows")
    order, classes = None, ()
    if task != "seq2seq-lm":
        classes = _class_order(name, meta["classes"], known)
        order = np.array([classes.index(name_of_class) for name_of_class in meta["classes"]], dtype=np.int64)
    train, valid = (
        LabelledText(
            files=files[split],
            task=task,
            seq_len=seq_len,
            target_len=encoder.target_length,
            pad_id=encoder.pad_id,
            order=order,
            pairs=meta["types"],
        )
        for split in SPLITS
    )
    return Data(
        name=name,
        train=train,
        valid=valid,
        inputs=_inputs(task, encoder, classes, meta["types"]),
        decode=text_decoder(tokenizer),
        end_id=tokenizer.eod_id,
        notes=tuple(_notes(name, meta, classes)),
    )


def _inputs(task: Task, encoder: LabelledEncoder, classes: Sequence[str], pairs: bool) -> Inputs:
    """Return the inputs of a model for these data."""
    size, length = encoder.tokenizer.vocab_size, encoder.length
    if task == "seq2seq-lm":
        tensors = (
            NamedInput(name="input_ids", shape=(length,), ids=size),
            NamedInput(name="attention_mask", shape=(length,), ids=2),
            NamedInput(name="labels", shape=(encoder.target_length,), ids=size),
        )
        return NamedInputs(tensors=tensors, vocab_size=size, seq_len=length, padded=True)
    return LabelledTextInputs(
        vocab_size=size, seq_len=length, classes=tuple(classes), pad_id=encoder.pad_id, tags=task == "tag", pairs=pairs
    )


def text_decoder(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """Return the function that turns ids into text without special tokens."""
    if tokenizer.loaded is None:
        return tokenizer.decode
    return lambda ids: tokenizer.loaded.decode(ids, skip_special_tokens=True)


# The order decides what an output of the head means. A fine-tuned classifier keeps the order of its own classes.
def _class_order(name: str, names: list[str], known: Sequence[str]) -> list[str]:
    """Return the classes in the order of their ids. Raises UserError for too few or too many."""
    # A class may have no row in the new data. Its output of the head then stays unused.
    if known and set(names) <= set(known):
        return list(known)
    fractions = [class_name for class_name in names if is_fraction(class_name)]
    if len(fractions) > len(names) / 2:
        message = f"--data {name} has labels like {fractions[0]}: a fraction is not a class"
        hint = "set --label-field to another field; regression is not supported"
        raise UserError(Problem(kind="data-classes", message=message, hint=hint, where="--label-field"))
    numeric = all(class_name.removeprefix("-").isdecimal() for class_name in names)
    # by value, so that 10 comes after 9; each class then has its own number as id where these are 0, 1, 2, ...
    classes = sorted(names, key=lambda class_name: (int(class_name) if numeric else 0, class_name))
    if not 2 <= len(classes) <= MOST_CLASSES:
        message = f"--data {name} has {counted(len(classes), 'class')}; 2 to {MOST_CLASSES:,} are supported"
        hint = "set --label-field to another field; numbers like scores or prices are not classes"
        raise UserError(Problem(kind="data-classes", message=message, hint=hint, where="--label-field"))
    return classes


def refuse_unknown_classes(name: str, inputs: Inputs, known: Sequence[str]) -> None:
    """Raise UserError if the data have classes that a trained model does not have."""
    if not isinstance(inputs, LabelledTextInputs) or list(inputs.classes) == list(known):
        return
    foreign = [class_name for class_name in inputs.classes if class_name not in known]
    message = f"--data {name} has classes that the model lacks: {', '.join(foreign[:SHOWN])}"
    raise data_error("classes", message, f"the model has {', '.join(known[:SHOWN])} ({nearest(foreign[0], known)})")


def _notes(name: str, meta: _Meta, classes: Sequence[str]) -> Iterator[str]:
    """Yield what the user should know of the rows and classes."""
    rows = meta["rows"]
    what = f", {counted(len(classes), 'class')}: {', '.join(classes[:SHOWN])}" if classes else ""
    yield f"{name}: {rows['train']:,} training rows and {rows['valid']:,} validation rows{what}"
    if meta["cut"]:
        yield f"{meta['cut']:,} texts are longer than a sample and were truncated"


def _open_files(
    source: RecordSource, fields: LabelledFields, encoder: LabelledEncoder, progress: Reporter
) -> tuple[_Meta, dict[str, dict[str, TokenFile]]]:
    """Return a source's facts and files by split and part, and cache them."""

    def write(staging: Path, documents: int) -> None:
        writer = SplitWriter(staging, PARTS, ("starts", "label_starts"))
        meta: _Meta = {"rows": dict.fromkeys(SPLITS, 0), "classes": [], "cut": 0, "types": False}
        classes = defaultdict[str, int](count().__next__)  # numbered in the order of their first rows
        with progress.task(f"{source.name}: tokenizing", documents, "rows") as task:
            for row, sample in without_problems(_encoded(source, fields, encoder, classes, documents)):
                split = SPLITS[row.held_out]
                for part, values in (("ids", sample.ids), ("types", sample.types), ("labels", sample.labels)):
                    writer.put(split, part, values)
                writer.end(split, "starts", len(sample.ids))
                writer.end(split, "label_starts", len(sample.labels))
                meta["rows"][split] += 1
                meta["cut"] += sample.cut
                meta["types"] |= bool(sample.types.any())
                task.advance()
        writer.close()
        meta["classes"] = list(classes)
        write_meta(staging, {"format": FORMAT, "source": source.name, **meta})

    settings = (encoder.task, str(encoder.length), str(encoder.target_length), *map(str, vars(fields).values()))
    identity = (encoder.tokenizer.identity, FORMAT, *settings)
    return Preparation(source=source, identity=identity, write=write, read=_read).open(progress)


def _encoded(
    source: RecordSource, fields: LabelledFields, encoder: LabelledEncoder, classes: Mapping[str, int], documents: int
) -> Iterator[tuple[PlacedRecord, EncodedLabelled] | Problem]:
    """Yield all rows with their samples, and a problem for each bad row."""
    names, remaining = source.class_names(fields.label), source.records(documents)
    while block := list(islice(remaining, AT_ONCE)):
        rows, read = [], []
        for row in block:
            if isinstance(row, Problem):
                yield row
                continue
            labelled = read_row(row.values, fields, encoder.task, names)
            if isinstance(labelled, str):
                message, hint = f"{row.where}: {labelled}", "set --text-field and --label-field to other fields"
                yield Problem(kind="bad-rows", message=message, hint=hint, where=row.where)
            else:
                rows.append(row)
                read.append(labelled)
        yield from zip(rows, encoder.encode_all(read, classes), strict=True)


def _read(folder: Path) -> tuple[_Meta, dict[str, dict[str, TokenFile]]] | None:
    """Return the content of a complete folder; None if it is missing or incomplete."""
    if (meta := read_meta(folder)) is None:
        return None
    files = {
        split: {part: TokenFile(folder / f"{split}.{part}", dtype) for part, dtype in PARTS.items()} for split in SPLITS
    }
    return cast(_Meta, meta), files
