"""Write a model's folder, completely or not at all: safetensors files and zerofit.json."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerofit.checkpoint.direct_file import PIECE
from zerofit.checkpoint.direct_io import NumbersFile, buffer, copy
from zerofit.checkpoint.store import FrozenWeights, sync_folders
from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.models.presets import ModelArgs
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.files import sync_file, sync_folder, write_json
from zerofit.spec.foreign import read_json
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run
from zerofit.spec.units import shown_bytes

T = TypeVar("T")
SPARE_BYTES = 1 << 24  # for files other than weights
PLAN = ".plan.json"  # identifies an interrupted conversion
STAGING = ".writing"  # folder of incomplete files
NOT_OUTPUT = (STAGING, "lost+found")  # ext4 makes lost+found in the root of a file system
CARD = "zerofit.json"  # the model and its inputs
SAFETENSORS_NAMES = {
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
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}


def refuse_existing(out: Path) -> None:
    """Raise UserError "output-exists" if `out` exists and is not an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and all(path.name in NOT_OUTPUT for path in out.iterdir())):
        hint = "use a folder that does not exist"
        raise UserError(Problem(kind="output-exists", message=f"{out} already exists", hint=hint, where="OUT"))


def refuse_small_disk(out: Path, needed_bytes: int, where: str = "OUT") -> None:
    """Raise UserError "disk-full" if `needed_bytes` + SPARE_BYTES are not free for `out`."""
    existing = next(path for path in (out, *out.parents) if path.exists())
    free, needed = shutil.disk_usage(existing).free, needed_bytes + SPARE_BYTES
    if free < needed:
        message = f"needs {shown_bytes(needed)} of disk space, but {existing} has {shown_bytes(free)} free"
        raise UserError(Problem(kind="disk-full", message=message, hint="use a folder on another disk", where=where))


@contextmanager
def staged_folder(out: Path, plan: dict[str, object] | None = None) -> Iterator[Path]:
    """Yield a folder to write into.

    On success it is synced and renamed to `out`, else it is removed. If `out` is the root of a file system, the
    folder is inside, and its files are moved to `out`. With a `plan`, an interrupted call leaves the folder in place.
    The next call with the same plan continues with its files.
    """
    refuse_existing(out)
    out = Path(os.path.realpath(out))  # a link to an empty folder cannot be replaced by a folder
    # next to `out` or inside, so that the rename stays on one file system
    staging = out.with_name(f".{out.name}{STAGING}") if _remove_empty(out) else out / STAGING
    then = f"; the same command then continues with the files in {staging}" if plan else ""
    with writable(out, then), _locked(staging, plan):
        try:
            yield staging
            for path in staging.rglob("*"):
                if path.is_file():
                    sync_file(path)
            (staging / PLAN).unlink(missing_ok=True)
            sync_folders(staging)
            if staging.parent != out:
                os.rename(staging, out)
                sync_folder(out.parent)
            else:
                for path in staging.iterdir():
                    os.rename(path, out / path.name)
                staging.rmdir()
                sync_folder(out)
        except BaseException:
            for path in staging.rglob(".*"):  # incomplete files would keep a full disk full
                if path.is_file() and path.name != PLAN:
                    path.unlink()
            if not plan or not any(path.is_file() for path in staging.rglob("[!.]*")):
                shutil.rmtree(staging, ignore_errors=True)
            raise


def _remove_empty(out: Path) -> bool:
    """Remove an empty folder. Return False for a mount, or a folder whose parent is read-only."""
    try:
        out.rmdir()
    except OSError:
        return not out.exists()
    return True


@contextmanager
def writable(out: Path, then: str = "") -> Iterator[None]:
    """Turn errors of the system, also wrapped by torch, into UserError "output-unwritable"."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        message = f"{out} cannot be written: {cause.strerror or cause}"
        hint = f"check the free disk space and permissions{then}"
        raise UserError(Problem(kind="output-unwritable", message=message, hint=hint, where="OUT")) from error


@contextmanager
def _locked(staging: Path, plan: dict[str, object] | None) -> Iterator[None]:
    """Create the staging folder and lock it.

    Remove the leftovers of a killed call, unless that call had the same plan.
    """
    staging.mkdir(parents=True, exist_ok=True)
    folder = os.open(staging, os.O_RDONLY)
    try:
        try:
            # The kernel releases the lock when the process ends, so a killed call does not block the next call.
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message, hint = f"another process is writing {staging}", "wait for it, or use another folder"
            raise UserError(Problem(kind="output-exists", message=message, hint=hint, where="OUT")) from None
        except OSError:  # a network file system without locks
            pass
        file, wanted = staging / PLAN, json.dumps(plan, sort_keys=True)
        continues = plan is not None and file.is_file() and file.read_text() == wanted
        for path in staging.rglob("*"):  # names of incomplete files begin with a dot
            if path.is_file() and not (continues and (path.name[0] != "." or path == file)):
                path.unlink()
        if plan:
            file.write_text(wanted)
        yield
    finally:
        os.close(folder)


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    fill: Callable[[Tensor, int], None]  # fills a flat tensor with the elements from an index on
    in_pieces: bool  # whether a part is read without the rest

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the full tensor."""
        out = torch.empty(self.shape, dtype=dtype)
        self.fill(out.view(-1), 0)
        return out


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in the file in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def cut(tensors: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Split tensors into groups of at most `most_bytes`. A larger tensor has its own group."""
    groups: list[list[T]] = [[]]
    free = most_bytes  # in the last group
    for tensor in tensors:
        size = size_of(tensor)
        if size > free and groups[-1]:
            groups.append([])
            free = most_bytes
        groups[-1].append(tensor)
        free -= size
    return groups


# A safetensors file is [8 bytes: length of the header][header: JSON of names, types, shapes, offsets][data]. The
# header needs only shapes, so it is written first, and tensors are then written at their offsets in any order.
class TensorFile:
    """A safetensors file that is written tensor by tensor in any order.

    All offsets are known. Wide types come first, so every tensor is aligned.
    """

    def __init__(self, path: Path, entries: list[TensorEntry]):
        self.path, self.entries = path, sorted(entries, key=lambda e: -e.dtype.itemsize)
        header = _header(self.entries)
        path.write_bytes(header)
        self._allocated = False
        self._lock, self._left = Lock(), sum(entry.bytes for entry in entries)  # bytes to write
        self._edges: list[tuple[int, bytes]] = []  # see `DirectFile.write_bytes`
        os.truncate(path, len(header) + self._left)
        self._places: dict[str, tuple[int, TensorEntry]] = {}
        offset = len(header)
        for entry in self.entries:
            self._places[entry.name] = (offset, entry)
            offset += entry.bytes

    def write(self, name: str, tensor: Tensor | LazyTensor, wrote: Callable[[int], None] = lambda count: None) -> None:
        """Write one tensor. `wrote` gets the bytes of each piece. Raises the errors of `pieces`."""
        for piece in self.pieces(name, tensor):
            wrote(piece())

    def pieces(self, name: str, tensor: Tensor | LazyTensor) -> Iterator[Callable[[], int]]:
        """Yield functions that write the pieces of one tensor and return their bytes.

        Threads may call them at the same time, also those of several tensors. A function raises UserError "overflow"
        if a number does not fit the narrower type.
        """
        place, entry = self._places[name]
        if not entry.shape and isinstance(tensor, Tensor):
            tensor = tensor.reshape(())  # engines store scalars as vectors of length 1
        assert tuple(tensor.shape) == entry.shape, f"{name} is {tuple(tensor.shape)}, not {entry.shape}"
        fill = tensor.fill if isinstance(tensor, LazyTensor) else partial(_copy_part, tensor.reshape(-1))
        if not self._allocated:  # not in __init__: finished files may be moved to another disk meanwhile
            with NumbersFile(self.path, os.O_RDWR) as file:
                file.allocate()
            self._allocated = True
        for start, end in _spans(place, entry):
            yield partial(self._write_piece, name, fill, start, end)

    def _write_piece(self, name: str, fill: Callable[[Tensor, int], None], start: int, end: int) -> int:
        """Write a tensor's elements `start` to `end`. The last piece also writes all edges."""
        place, entry = self._places[name]
        out = buffer(place + start * entry.dtype.itemsize, end - start, entry.dtype)
        fill(out, start)
        _refuse_overflow(name, out, fill, start)
        with NumbersFile(self.path, os.O_RDWR) as file:
            edges = file.write(place + start * entry.dtype.itemsize, out)
            with self._lock:
                self._edges += edges
                self._left -= out.nbytes
                if not self._left:
                    file.write_edges(self._edges)
        return out.nbytes


def check_file(path: Path, entries: list[TensorEntry]) -> None:
    """Read a file's header again and compare it. Raises RunFailed "export-damaged"."""
    expected = {e.name: (list(e.shape), SAFETENSORS_NAMES[e.dtype]) for e in entries}
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            written = {name: (list(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        written = str(error)
    if written != expected:
        message = f"{path.name} differs from what was written"
        hint = "check the disk, and export again; the damaged export was removed"
        raise RunFailed(Problem(kind="export-damaged", message=message, hint=hint, where=str(path)))


def _header(entries: list[TensorEntry]) -> bytes:
    """Return the header: 8 bytes of length, then JSON, padded to a multiple of 8 bytes."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in SAFETENSORS_NAMES:
            message = f"{entry.name} has the type {entry.dtype}, which safetensors files do not support"
            raise UserError(Problem(kind="no-whole-view", message=message, where="PATH"))
        place = [offset, offset + entry.bytes]
        dtype = SAFETENSORS_NAMES[entry.dtype]
        described[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": place}
        offset += entry.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _spans(place: int, entry: TensorEntry) -> list[tuple[int, int]]:
    """Split a tensor at the file offsets n * PIECE.

    Returns (start, end) in elements. `place`: the tensor's offset in bytes.
    """
    size, total = entry.dtype.itemsize, math.prod(entry.shape)
    # Pieces that begin at multiples of PIECE in the file consist of full blocks, which direct writes need.
    first = (PIECE - place % PIECE) // size
    cuts = [0, *range(first, total, PIECE // size), total]
    return [(start, end) for start, end in pairwise(cuts) if start < end]


def _copy_part(source: Tensor, out: Tensor, start: int) -> None:
    copy(out, source[start : start + len(out)])


# In float16 a number above 65504 becomes infinite. Only then the piece is read again, in float64, to see whether the
# number was infinite before.
def _refuse_overflow(name: str, out: Tensor, fill: Callable[[Tensor, int], None], start: int) -> None:
    if out.dtype != torch.float16 or not out.isinf().any():
        return
    numbers = torch.empty(len(out), dtype=torch.float64)
    fill(numbers, start)
    if (out.isinf() & numbers.isfinite()).any():
        message = f"{name} has the value {numbers.abs().max():g}, but float16 ends at 65504"
        raise UserError(Problem(kind="overflow", message=message, hint="use --dtype bf16 or fp32", where="--dtype"))


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts needed to evaluate or use a saved model, in addition to its weights."""

    model: str  # as in the run; the architecture of transformers models is in config.json
    model_args: ModelArgs
    task: Task
    inputs: Inputs
    loss: str | None  # of a user's model that returns no loss
    data: str | None
    text_field: str
    tokenizer: str  # "bytes", or a tokenizer of transformers; its files are then in the folder
    seq_len: int | None  # tokens
    image_size: int | None  # pixels
    step: int  # optimizer steps done
    dtype: str  # of the saved parameters: "float32", "bfloat16" or "float16"
    seed: int = 0  # of the run, also used for synthetic data
    frozen: FrozenWeights | None = None  # of adapters
    packing: bool = True  # whether training samples had several conversations
    stream: bool = False  # whether its data was streamed
    pretrained: str | None = None  # for adapters: source of the base weights, if not `model`'s folder
    pair_field: str | None = None
    label_field: str | None = None
    target_len: int | None = None  # tokens of a generated text

    @classmethod
    def of_run(
        cls, run: Run, task: Task, inputs: Inputs, step: int, dtype: str, frozen: FrozenWeights | None = None
    ) -> ModelInfo:
        """Return the facts about a model that this run trained for `step` steps."""
        shared = ("model", "model_args", "loss", "data", "text_field", "tokenizer", "seq_len", "image_size", "seed")
        shared += ("packing", "stream", "pair_field", "label_field", "target_len")
        return cls(
            **{name: getattr(run, name) for name in shared},
            # Adapters need their base model again. A full model does not, so its card names no folder of the machine.
            pretrained=os.path.abspath(run.pretrained.expanduser()) if run.pretrained and run.lora else None,
            task=task,
            inputs=inputs,
            step=step,
            dtype=dtype,
            frozen=frozen,
        )

    def write(self, folder: Path) -> None:
        """Write zerofit.json into a model's folder."""
        write_json(folder / CARD, {**asdict(self), "inputs": inputs_to_dict(self.inputs)})


def read_model_info(folder: Path) -> ModelInfo | None:
    """Read zerofit.json in a model's folder, if it exists. Raises UserError for a bad file."""
    file = folder / CARD
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        return TypeAdapter(ModelInfo).validate_python(content | {"inputs": inputs_from_dict(content["inputs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"{file} is not a valid zerofit.json: {type(error).__name__}: {reason}"
        hint = "export the checkpoint again with `zerofit ckpt export`"
        raise UserError(Problem(kind="bad-about", message=message, hint=hint, where=str(file))) from None
