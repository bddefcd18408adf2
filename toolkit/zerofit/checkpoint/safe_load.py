"""Load torch files safely, without running code in them."""

from __future__ import annotations

import importlib
import io
import pickle
import re
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from enum import EnumType
from mmap import MAP_PRIVATE
from mmap import mmap as map_memory
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open

from zerofit.checkpoint.direct_file import PIECE
from zerofit.checkpoint.direct_io import NumbersFile, copy
from zerofit.checkpoint.foreign import other_format
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_pickle import PlainUnpickler, read_pickle
from zerofit.spec.process import deepspeed_quiet


# A pickle may name any class or function, and unpickling calls it. torch's weights-only unpickler accepts tensors,
# plain containers and the names that it is given. DeepSpeed's files name four classes; none of their code is needed
# here.
class InertFragment:
    """A part of a flat partition: attributes `start` and `numel`, in elements."""


class InertLossScaler:
    """The attributes of a loss scaler: cur_scale; of a dynamic one also cur_iter and settings."""


class Inert:
    """A placeholder for objects that are not needed: a script's arguments, random states."""

    def __init__(self, *values: object, **named: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


# Classes in DeepSpeed's files, and their replacements, so reading a checkpoint does not import DeepSpeed (which
# takes seconds). Creating a replacement runs no code.
REPLACEMENTS: dict[str, type] = {
    # runtime/zero/stage_1_and_2.py and bf16_optimizer.py, `param_slice_mappings`
    "deepspeed.utils.tensor_fragment.fragment_address": InertFragment,
    # the ZeRO optimizers' `loss_scaler`, also in fp32 and bf16
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": InertLossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": InertLossScaler,
    # the ZeRO optimizers' `zero_stage`: an enum of integers
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    # arguments and random states in the files of Megatron-DeepSpeed, Accelerate and the Trainer
    **dict.fromkeys(("argparse.Namespace", "numpy.ndarray", "numpy.dtype", "_codecs.encode"), Inert),
    # NumPy 2 renamed numpy.core to numpy._core. A pickle has the name from the release that wrote it.
    **{f"numpy.{core}.multiarray.{name}": Inert for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
}
SAFETENSORS = ".safetensors"
FEW = 1 << 16  # the fewest elements for which a file is read
NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names since 3.13
ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # members of ZeroStageEnum


def _member(kind: object, name: str) -> object:
    """Return an enum's member. Refuse everything else.

    Python before 3.11.4 pickles a member as the call `getattr(class, name)`. This function replaces `getattr`.
    """
    if kind is int and name in ZERO_STAGES:
        return ZERO_STAGES[name]
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")


_TRUSTED = ContextVar("trusted", default=False)


@contextmanager
def trusted_pickles(trusted: bool) -> Iterator[None]:
    """Let `load` create objects of any class, whose code may run (--trust-pickle)."""
    token = _TRUSTED.set(trusted)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def load(path: Path | str, mmap: bool = True, for_engine: bool = False, span: tuple[int, int] | None = None) -> Any:
    """Load a torch file with its tensors on the CPU.

    With `mmap` they stay on disk until they are read. Only tensors, plain values and the classes of `REPLACEMENTS` are
    loaded. With `for_engine`, the result has DeepSpeed's own classes, which its engine needs to resume. `span`: (first
    byte, bytes) of a torch file within a larger file. If the file is a safetensors file, the function returns a mapping
    of its tensors.

    Raises UserError: "unsafe-file" if the file needs other classes, "damaged-file" if it cannot be parsed,
    "missing-file" if it does not exist, "unreadable-file" if the system cannot read it.
    """
    allowed: list[Callable[..., object] | tuple[Callable[..., object], str]] = []
    with deepspeed_quiet() if for_engine else nullcontext():
        for name, replacement in REPLACEMENTS.items():
            module, _, attribute = name.rpartition(".")
            real = for_engine and replacement is not Inert
            allowed.append((getattr(importlib.import_module(module), attribute) if real else replacement, name))
    allowed.append((_member, "builtins.getattr"))
    try:
        if str(path).endswith(SAFETENSORS):
            return Safetensors(path)
        if span:
            with open(path, "rb") as file:
                file.seek(span[0])
                # torch maps only complete files, by their path (serialization.py, `load`). So a part is read.
                part = io.BytesIO(file.read(span[1]))
            with torch.serialization.safe_globals(allowed):
                return torch.load(part, map_location="cpu", weights_only=not _TRUSTED.get())
        in_place = mmap and zipfile.is_zipfile(path)  # torch's older file format cannot be memory-mapped
        with torch.serialization.safe_globals(allowed), _unreserved_maps():
            return torch.load(path, map_location="cpu", weights_only=not _TRUSTED.get(), mmap=in_place)
    except OSError as error:
        raise _unopened(path, error) from None
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from None
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


# The replaced method of torch's class is visible to all threads, so only one thread at a time may load a file.
_MAPPING = Lock()
_MAPPED: dict[int, tuple[str, int]] = {}  # path and size of each mapped file, by its address


@contextmanager
def _unreserved_maps() -> Iterator[None]:
    """Let torch map files that are larger than the memory.

    torch (serialization.py, `load`) maps a file as private and writable, for which Linux reserves memory. Within
    the block, no memory is reserved.
    """
    with _MAPPING:
        setattr(torch.UntypedStorage, "from_file", _map)  # noqa: B010 - a method of its base class
        try:
            yield
        finally:
            delattr(torch.UntypedStorage, "from_file")


def _map(path: str, shared: bool, size: int) -> torch.UntypedStorage:
    # MAP_PRIVATE without a reservation: torch needs a writable map, but nobody writes to it.
    with open(path, "rb") as file:
        content = map_memory(file.fileno(), size, flags=MAP_PRIVATE | NORESERVE)
    mapped = torch.frombuffer(content, dtype=torch.uint8)
    address = mapped.data_ptr()
    _MAPPED[address] = (path, size)
    weakref.finalize(content, _MAPPED.pop, address, None)
    return mapped.untyped_storage()


def copy_numbers(out: torch.Tensor, stored: torch.Tensor) -> None:
    """Copy flat numbers of a mapped file into `out`, which may have another type.

    Arrays of `FEW` or more elements are read from the file instead of the map. This takes a tenth of the CPU time.
    """
    # The tensor's address shows its file and its place in this file: `_map` has recorded where each map begins.
    address, count, size = stored.data_ptr(), len(stored), stored.dtype.itemsize
    place = next(((p, address - a) for a, (p, total) in list(_MAPPED.items()) if a <= address < a + total), None)
    if place is None or count < FEW or not stored.is_contiguous():
        copy(out, stored)
        return
    with NumbersFile(place[0]) as file:
        for first in range(0, count, PIECE // size):
            part, start = out[first : first + PIECE // size], place[1] + first * size
            if part.dtype == stored.dtype and file.read_cached(start, part):
                continue
            numbers = file.read(start, len(part), stored.dtype)
            if len(numbers) < len(part):
                raise _damaged(place[0], "the file became shorter while it was read")
            copy(part, numbers)


class _MetadataReader(PlainUnpickler):
    """An unpickler for the metadata of torch.distributed.checkpoint.

    It refuses all classes but a few. Dataclasses become plain objects. torch's weights-only unpickler cannot read the
    newer protocol of this file.
    """

    def find_class(self, module: str, name: str) -> object:
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if module == "torch.distributed.checkpoint.metadata" and name in METADATA_CLASSES:
            return _Fields
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _Fields
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} was not an allowed global")


class _Fields:
    def __init__(self, *values: object):
        pass

    def __setstate__(self, state: Any) -> None:
        # TensorProperties gives a tuple, whose first field is the dtype
        self.__dict__.update({"dtype": state[0]} if isinstance(state, tuple) else state)


def _member_of_metadata(kind: object, name: str) -> _Fields:
    """Replace `getattr` in metadata, as `_member` does in torch files. No member of its enum is needed."""
    if kind is not _Fields:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr was not an allowed global")
    return _Fields()


METADATA_CLASSES = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")
METADATA_CLASSES += ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
PLAIN: dict[tuple[str, str], object] = {
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _member_of_metadata,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
}


def load_metadata(path: Path) -> Any:
    """Load the `.metadata` of a distributed checkpoint without running code, or raise as `load`."""
    try:
        metadata = read_pickle(path, _MetadataReader)
        if not isinstance(metadata.storage_data, dict) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError("no storage_data")
    except OSError as error:
        raise _unopened(path, error) from None
    except Unreadable as error:
        raise _refused(path, error.reason) from None
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    return metadata


class Safetensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, by name. They are read on demand."""

    def __init__(self, path: Path | str):
        self._file = safe_open(path, framework="pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header."""
        return tuple(self._file.get_slice(name).get_shape())

    def is_floating_point(self, name: str) -> bool:
        """Return whether a tensor has floating point numbers, from the header."""
        return self._file.get_slice(name).get_dtype().startswith(("F", "BF"))


def _refused(path: Path | str, reason: str) -> UserError:
    # torch's errors have no field for the refused name. It is only in these two texts (_weights_only_unpickler.py).
    match = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", reason)
    if match is None:
        return _damaged(path, reason)
    message = f"{path} contains {match[1]}, which could run code and does not belong in a checkpoint"
    hint = "use a checkpoint that you trust; zerofit did not run this code (`zerofit ckpt --trust-pickle` runs it)"
    return _error("unsafe-file", message, hint, path)


def _damaged(path: Path | str, reason: str) -> UserError:
    if what := other_format(Path(path)):
        return _error("damaged-file", f"{path} is {what}", "zerofit reads torch's files and safetensors", path)
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    kind = "safetensors" if str(path).endswith(SAFETENSORS) else "torch"
    return _error("damaged-file", f"{path} is damaged or not a {kind} file: {first}", "use an older checkpoint", path)


def _unopened(path: Path | str, error: OSError) -> UserError:
    kind = "missing-file" if isinstance(error, FileNotFoundError) else "unreadable-file"
    return _error(kind, f"{path} cannot be read: {error.strerror or error}", "", path)


def _error(kind: str, message: str, hint: str, path: Path | str) -> UserError:
    return UserError(Problem(kind=kind, message=message, hint=hint, where=str(path)))
