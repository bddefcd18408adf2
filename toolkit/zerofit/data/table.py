"""Tables of numbers: a CSV file or NumPy array of samples with a column of classes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerofit.data.base import Data, Integers, LabelledDataset, data_error
from zerofit.data.hashing import stratified_fifth
from zerofit.data.plain_files import open_cells
from zerofit.models.inputs import TableInputs
from zerofit.spec.errors import nearest
from zerofit.spec.run import Run
from zerofit.spec.units import counted

SHOWN = 5  # maximum number of broken rows and class names in a message
MOST_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class TableRows(LabelledDataset):
    """Rows of features with their classes."""

    features: np.ndarray  # float32 (n, features)
    labels: np.ndarray  # int64 (n,)
    draws = False

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """Return float32 (batch, features) and int64 (batch,); `keys` are unused."""
        import torch

        chosen = np.asarray(indices)
        return {"inputs": torch.from_numpy(self.features[chosen]), "labels": torch.from_numpy(self.labels[chosen])}


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The content of a file; classes are the texts of its label column."""

    features: np.ndarray  # float64 (n, features)
    classes: Sequence[str]  # for each of the n rows
    label: str  # the label column's name
    lines: Sequence[int]  # line of each row, from 1
    broken: tuple[str, ...] = ()  # "line 3: why"


def open_table(name: str, run: Run) -> Data:
    """Open csv:FILE[:COLUMN] or npy:FILE[:COLUMN]; COLUMN, by default the last, has the labels.

    A fixed fifth of each class is held out. Features are standardized by mean and deviation of the training rows.
    Raises UserError if labels are not classes, and unless `run.skip_bad` is set if rows are broken.
    """
    kind, _, argument = name.partition(":")
    path, column = _file_and_column(name, argument)
    try:
        table = _read_csv(path, column) if kind == "csv" else _read_npy(path, column)
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise data_error("data-missing", f"cannot read {path} as {kind}: {error}", f"use --data {kind}:FILE") from None
    if table.broken and not run.skip_bad:
        shown = "; ".join(table.broken[:SHOWN]) + ("; ..." if len(table.broken) > SHOWN else "")
        message = f"{len(table.broken)} of {len(table.broken) + len(table.lines)} rows of {path} are broken: {shown}"
        raise data_error("bad-rows", message, "fix these rows, or skip them with --skip-bad")
    labels, classes = _as_classes(path, table)
    held_out = stratified_fifth(labels)
    if held_out.all() or not held_out.any():
        raise data_error("data-too-short", f"{path} has {len(labels)} rows, too few to hold out a fifth", "add rows")
    # Mean and deviation are from training rows only, so that validation rows do not influence the model's inputs.
    known = table.features[~held_out]
    mean, std = known.mean(axis=0), known.std(axis=0)
    varies = np.ptp(known, axis=0) > 0  # rounding can make the deviation of equal numbers positive
    features = ((table.features - mean) / np.where(varies & (std > 0), std, 1.0)).astype(np.float32)
    train, valid = (TableRows(features=features[part], labels=labels[part]) for part in (~held_out, held_out))
    notes = [f"{path}: {len(train)} training rows and {len(valid)} validation rows, classes in {table.label!r}"]
    notes += [f"{counted(len(table.broken), 'broken row')} skipped"] if table.broken else []
    inputs = TableInputs(features=features.shape[1], classes=len(classes))
    return Data(name=name, train=train, valid=valid, inputs=inputs, notes=tuple(notes))


def _file_and_column(name: str, argument: str) -> tuple[Path, str]:
    """Split "FILE:COLUMN"; a file whose name contains a colon is not split. Raises UserError."""
    path, column = Path(argument).expanduser(), ""
    if not path.is_file() and ":" in argument:
        before, _, column = argument.rpartition(":")
        path = Path(before).expanduser()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        kind = name.partition(":")[0]
        raise data_error("data-missing", f"--data {name}: {path} {what}", f"use {kind}:FILE or {kind}:FILE:COLUMN")
    return path, column


def _read_csv(path: Path, column: str) -> _Table:
    """Read a table of a CSV file."""
    file, delimiter = open_cells(path)
    with file:
        reader = csv.reader(file, delimiter=delimiter)
        # line_num, and not the number of the row: a quoted cell may have line breaks
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    if not lines:
        raise ValueError("it is empty")
    # The first line names the columns if it has no number, or if it contains the user's name of a column.
    first = lines[0][1]
    named = all(_number(cell) is None for cell in first) or (column in first and _number(column) is None)
    names = first if named else [str(n) for n in range(1, len(first) + 1)]
    label = _label_column(path, names, column)
    # columns of words first, otherwise every row would be reported as broken
    _refuse_words(path, names, label, [row for _, row in lines[named:] if len(row) == len(names)])
    rows, line_numbers, broken = [], [], []
    for line, row in lines[named:]:
        fault = _fault(row, names, label)
        if fault:
            broken.append(f"line {line}: {fault}")
        else:
            rows.append(row)
            line_numbers.append(line)
    features = [[float(cell) for n, cell in enumerate(row) if n != label] for row in rows]
    return _Table(
        features=np.array(features, dtype=np.float64).reshape(len(rows), len(names) - 1),
        classes=[row[label] for row in rows],
        label=names[label],
        lines=line_numbers,
        broken=tuple(broken),
    )


def _read_npy(path: Path, column: str) -> _Table:
    """Read an array of numbers (rows, columns); lines and columns are counted from 1."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # fails if the header declares more data than the file has
    except Exception as error:  # the header is a Python literal, so numpy raises many types
        raise ValueError(f"{type(error).__name__}: {error}"[:200]) from None
    if array.ndim != 2 or array.dtype.kind not in "fiub" or not array.size:
        raise ValueError("it is not an array of numbers (rows, columns)")
    names = [str(n) for n in range(1, array.shape[1] + 1)]
    label = _label_column(path, names, column)
    array = array.astype(np.float64)
    finite = np.isfinite(array).all(axis=1)
    return _Table(
        features=np.delete(array[finite], label, axis=1),
        # 17 digits tell any two float64 numbers apart
        classes=[f"{value:.17g}" for value in array[finite, label]],
        label=names[label],
        lines=[int(row) + 1 for row in np.flatnonzero(finite)],
        broken=tuple(f"line {n + 1}: a value is not finite" for n in np.flatnonzero(~finite)),
    )


def _label_column(path: Path, names: Sequence[str], column: str) -> int:
    """Return the index of the labels' column. Raises UserError if there is no such column."""
    if len(names) < 2:
        raise ValueError(f"it has {len(names)} column, but needs features and a label")
    if column and column not in names:
        message = f"{path} has no column {column!r} ({', '.join(names[:20])}{', ...' if len(names) > 20 else ''})"
        hint = nearest(column, names) or "name one of these columns; without a name, zerofit uses the last"
        raise data_error("data-argument", message, hint)
    return names.index(column) if column else len(names) - 1


def _refuse_words(path: Path, names: Sequence[str], label: int, rows: Sequence[Sequence[str]]) -> None:
    """Raise UserError for columns without any number: they cannot be features."""
    words = [n for n in range(len(names)) if n != label and rows and all(_number(row[n]) is None for row in rows)]
    if words:
        shown = ", ".join(f"{names[n]!r} ({rows[0][n][:20]!r}, ...)" for n in words[:SHOWN])
        message = f"{path}: {len(words)} of {len(names)} columns have no numbers: {shown}"
        hint = "replace words with numbers or remove the columns; FILE:COLUMN sets the column of the classes"
        raise data_error("data-columns", message, hint)


def _fault(row: Sequence[str], names: Sequence[str], label: int) -> str:
    """Return what is wrong with a row; "" if nothing. `label`: index of the labels' column."""
    if len(row) != len(names):
        return f"{len(row)} cells for {len(names)} columns"
    for column, (cell, name) in enumerate(zip(row, names, strict=True)):
        if column == label and not cell:
            return f"no label in {name!r}"
        if column != label and _number(cell) is None:
            return f"{cell!r} in {name!r} is not a finite number"
    return ""


def _number(cell: str) -> float | None:
    """Return the finite number in a cell; None if there is none."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def is_fraction(cell: str) -> bool:
    """Return whether a cell is a number with a fraction. Such numbers cannot be classes."""
    value = _number(cell)
    return value is not None and value != int(value)


# Spreadsheets write a class as 1, 1.0 or "1". A column of prices is refused, since each price would be a class.
def _as_classes(path: Path, table: _Table) -> tuple[np.ndarray, list[str]]:
    """Return labels int64 (n,) and the classes, sorted as numbers or else as words."""
    for word, line in zip(table.classes, table.lines, strict=True):
        if is_fraction(word):
            message = f"{path}, line {line}: the label {word} is a fraction, not a class"
            raise data_error("data-classes", message, "set the column of the classes: FILE:COLUMN")
    values = {word: _number(word) for word in set(table.classes)}
    # A line of column names with a number in it was read as a row, whose label is then the only word.
    first, others = table.classes[:1], set(table.classes[1:])
    if others and [values[word] for word in first] == [None] and all(values[word] is not None for word in others):
        message = f"{path}, line {table.lines[0]}: the label {first[0]!r} is a word, but all others are numbers"
        raise data_error("data-classes", message, f"if it is the column's name, use FILE:{first[0]}")
    numeric = all(value is not None for value in values.values())
    keys = {word: f"{int(value or 0)}" if numeric else word for word, value in values.items()}  # "1" is "1.0"
    classes = sorted(set(keys.values()), key=lambda word: (int(word) if numeric else 0, word))
    if not 2 <= len(classes) <= MOST_CLASSES:
        message = f"{path}: {table.label!r} has {counted(len(classes), 'class')}; 2 to {MOST_CLASSES:,} are supported"
        raise data_error("data-classes", message, "set the column of the classes: FILE:COLUMN")
    numbers = {word: n for n, word in enumerate(classes)}
    return np.array([numbers[keys[word]] for word in table.classes], dtype=np.int64), classes
