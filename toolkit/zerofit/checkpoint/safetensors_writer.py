"""Writing safetensors files tensor by tensor: no more than a piece of one tensor is in memory beside it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerofit.spec.errors import Problem, RunFailed, UserError

PIECE = 1 << 24  # elements that are converted at a time
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def cut(entries: list[TensorEntry], most_bytes: int) -> list[list[TensorEntry]]:
    """Split the entries, in their order, into files of at most so many bytes; a larger tensor has a file of its own."""
    files: list[list[TensorEntry]] = [[]]
    room = most_bytes
    for entry in entries:
        if entry.bytes > room and files[-1]:
            files.append([])
            room = most_bytes
        files[-1].append(entry)
        room -= entry.bytes
    return files


def write_file(
    path: Path, entries: list[TensorEntry], read: Callable[[str], Tensor], wrote: Callable[[int], None]
) -> None:
    """Write one safetensors file; `read` gives each tensor in its turn, `wrote` is called with bytes as they go out.

    Wide types come first, so that every tensor is aligned. Raises UserError "overflow" where a number has none in the
    narrower type.
    """
    ordered = sorted(entries, key=lambda e: -e.dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(ordered))
        for entry in ordered:
            tensor = read(entry.name)
            assert tuple(tensor.shape) == entry.shape, f"{entry.name} is {tuple(tensor.shape)}, not {entry.shape}"
            for piece in _pieces(tensor, entry):
                file.write(piece)
                wrote(len(piece))


def check_file(path: Path, entries: list[TensorEntry]) -> None:
    """Open a file again and compare its header with what should be in it. Raises RunFailed "export-damaged"."""
    expected = {e.name: (list(e.shape), DTYPES[e.dtype]) for e in entries}
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            found = {name: (list(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        found = str(error)
    if found != expected:
        message = f"{path.name} does not read back as it was written"
        hint = "is the disk full or failing? Nothing was kept: export again"
        raise RunFailed(Problem(kind="export-damaged", message=message, hint=hint, where=str(path)))


def _header(entries: list[TensorEntry]) -> bytes:
    """Return eight bytes of length, then JSON, padded so that the data begins at a multiple of eight."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.bytes]
        described[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": place}
        offset += entry.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(tensor: Tensor, entry: TensorEntry) -> Iterator[memoryview]:
    for piece in tensor.reshape(-1).split(PIECE):
        narrowed = piece.to(entry.dtype)
        if entry.dtype == torch.float16 and (narrowed.isinf() & piece.isfinite()).any():
            message = f"{entry.name} holds {piece.abs().max():g}; float16 ends at 65504"
            raise UserError(Problem(kind="overflow", message=message, hint="--dtype bf16 or fp32", where="--dtype"))
        yield narrowed.contiguous().view(torch.uint8).numpy().data
