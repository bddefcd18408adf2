"""Weight files of a model: which there are, whether they are whole, what is in them."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofit.checkpoint import safetensors_writer
from zerofit.checkpoint.safe_load import load
from zerofit.spec.errors import Problem, Problems, UserError

INDEX = ".index.json"  # of several files
# in the order in which transformers takes them
NAMES = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)
LONGEST_HEADER = 100_000_000  # bytes; what the safetensors library takes
DTYPES = {name: dtype for dtype, name in safetensors_writer.DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for one that is not written by us (8-bit floats)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """A model's weights on the disk, by name."""

    tensors: dict[str, StoredTensor]
    pickled: bool  # written by torch.save, and not in the safetensors format

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of the floating point numbers."""
        counts: Counter[torch.dtype] = Counter()
        for stored in self.tensors.values():
            if stored.dtype is not None and stored.dtype.is_floating_point:
                counts[stored.dtype] += math.prod(stored.shape)
        return counts.most_common(1)[0][0] if counts else torch.float32


def has_weights(folder: Path) -> bool:
    """Whether a folder holds files of weights under the names that transformers gives them."""
    return any((folder / name).is_file() for name in NAMES)


def read_weights(folder: Path) -> StoredWeights:
    """Return what the files in a model's folder hold, from their headers alone.

    Raises UserError: "weights-missing", "weights-damaged", or of a pickle "unsafe-file" or "damaged-file".
    """
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    if name is None:
        message = f"{folder} holds no weights: none of {', '.join(NAMES)}"
        raise UserError(Problem(kind="weights-missing", message=message, hint="is the copy complete?", where="CKPT"))
    files = _shards(folder / name) if name.endswith(INDEX) else [folder / name]
    pickled = files[0].suffix == ".bin"
    problems = Problems()
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= problems.attempt(lambda file=file: _pickle(file) if pickled else _header(file)) or {}
    problems.raise_if_any()
    return StoredWeights(tensors=tensors, pickled=pickled)


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names. Raises UserError with every one that is not there."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"it is not an index of shards ({type(error).__name__}: {error})") from None
    problems = Problems()
    for name in names:
        if not (index.parent / name).is_file():
            message = f"{index.parent} lacks {name}, which {index.name} names"
            problems.add("weights-missing", message, "is the copy complete?", "CKPT")
    problems.raise_if_any()
    return [index.parent / name for name in names]


def _header(file: Path) -> dict[str, StoredTensor]:
    """Return a safetensors file's tensors; its length must be as its header says, since reading maps it to memory."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {
            name: StoredTensor(file=file, shape=tuple(entry["shape"]), dtype=DTYPES.get(entry["dtype"]))
            for name, entry in header.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(file, f"it has no whole header ({error})") from None
    if end != size:
        what = "is cut short" if size < end else "is longer than it should be"
        raise _damaged(file, f"it {what}: {size:,} bytes of {end:,}")
    return tensors


def _pickle(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a torch file, mapped to memory and not read."""
    held = load(file)
    if not isinstance(held, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in held.values()):
        raise _damaged(file, "it holds something else than tensors by name")
    return {
        name: StoredTensor(file=file, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in held.items()
    }


def _damaged(file: Path, what: str) -> UserError:
    hint = "copy or export it again"
    message = f"{file} is damaged: {what}"
    return UserError(Problem(kind="weights-damaged", message=message, hint=hint, where="CKPT"))
