"""The index of any program's checkpoint: file and place of each stretch of a tensor.

zerofit's own checkpoints contain it (ranks/rank-*.json, from `train.shard_index`). For checkpoints of other programs,
`checkpoint.foreign` builds the index from the metadata in their files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor

from zerofit.checkpoint.store import Count
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.foreign import Unreadable, read_json, shaped
from zerofit.spec.units import counted

MASTER = "fp32"  # the weights, in the optimizer's precision
# fp16's dynamic loss scaler: its state, and DeepSpeed's settings of it (runtime/fp16/loss_scaler.py)
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCALER_SETTINGS = ("scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
HINT = "`zerofit ckpt verify` lists the damaged files; use another checkpoint"


@dataclass(frozen=True)
class TensorSlice:
    """A rank's share of a weight, for tensor and expert parallelism.

    It is (start, length) ranges along `dim` of the full tensor, concatenated.
    """

    dim: Count
    ranges: tuple[tuple[Count, Count], ...]
    joined: Count = 0  # number of dimensions after `dim` that are flattened into it, for rows of stacked matrices

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the rank's share if the full tensor has the shape `full`."""
        rest = full[self.dim + self.joined + 1 :]
        return (*full[: self.dim], sum(length for _, length in self.ranges), *rest)

    def length(self, full: tuple[int, ...]) -> int:
        """Return the total length of all ranks' shares along `dim`, for a tensor with shape `full`."""
        return math.prod(full[self.dim : self.dim + self.joined + 1])

    def take(self, full: Tensor) -> Tensor:
        """Return the rank's share of a full tensor."""
        rows = full.flatten(self.dim, self.dim + self.joined)
        return torch.cat([rows.narrow(self.dim, start, length) for start, length in self.ranges], self.dim)

    def put(self, full: Tensor, share: Tensor) -> None:
        """Copy a share into its place in the full tensor, which must be contiguous."""
        # `view` fails instead of copying, so a full tensor that is not contiguous cannot silently stay unchanged.
        rows = full.view(*full.shape[: self.dim], -1, *full.shape[self.dim + self.joined + 1 :])
        parts = share.split([length for _, length in self.ranges], self.dim)
        for (start, length), part in zip(self.ranges, parts, strict=True):
            rows.narrow(self.dim, start, length).copy_(part)


@dataclass(frozen=True)
class Location:
    """The place of a tensor: nested keys in a torch file, or a `raw` file of numbers.

    In a safetensors file the only key is the tensor's name. `span`: first byte and length of a torch file that is
    embedded in this file. `dtype`: the tensor's type, if it is known without reading the tensor.
    """

    file: str
    keys: list[str | int]
    offset: Count = 0  # in elements of the flattened tensor
    raw: Literal["float32", "bfloat16", "float16"] | None = None
    span: tuple[Count, Count] | None = None  # first byte, length in bytes
    lost: bool = False  # the file is lost: the numbers are taken as zero
    dtype: str = ""


@dataclass(frozen=True)
class Shard:
    """A stretch of a parameter in the files."""

    name: str
    shape: tuple[Count, ...]  # of the full tensor
    cut: TensorSlice | None
    start: Count  # in the flattened share
    numel: Count
    where: dict[str, Location]  # by kind: "fp32", and the optimizer's states


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer in the files, or a block of it."""

    name: str
    file: str
    keys: list[str | int]
    span: tuple[Count, Count] | None = None
    offsets: tuple[Count, ...] = ()  # of the block's first element, by dimension
    full: tuple[Count, ...] | None = None  # shape of the full tensor, if this is a block


@dataclass(frozen=True)
class ParameterGroup:
    """An optimizer's parameters, in order, and their settings (`lr`, `betas`, ...)."""

    names: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True)
class EngineIndex:
    """One engine's part of an index. A GAN has two engines."""

    names: list[str]
    parameters: list[Shard]
    buffers: list[SavedBuffer]
    ties: dict[str, str]
    counters: dict[str, Any]
    unsupported: str | None
    notes: list[str] = field(default_factory=list)  # notes on data that another program's files do not contain
    lost: list[str] = field(default_factory=list)  # lost files whose tensors --repair replaces
    groups: list[ParameterGroup] = field(default_factory=list)  # if another program's files have them


def scaler_numbers(scaler: object) -> dict[str, float] | None:
    """Return the numbers of an fp16 loss scaler, given as an object or a dict.

    A static scale has only `cur_scale`. For bf16 and fp32, whose scale is always 1, return None.
    """
    fields = scaler if isinstance(scaler, dict) else vars(scaler)
    numbers = {key: fields[key] for key in (*SCALER, *SCALER_SETTINGS) if type(fields.get(key)) in (int, float, bool)}
    if "scale_window" in numbers:
        return numbers
    return {"cur_scale": numbers["cur_scale"]} if numbers.get("cur_scale", 1) != 1 else None


@dataclass(frozen=True)
class RankIndex:
    """A rank's index of its files."""

    world_size: int
    engines: dict[str, EngineIndex]


def read_ranks(folder: Path) -> Iterator[RankIndex]:
    """Read the index of each rank from zerofit's own checkpoint, in the order of ranks.

    Raises UserError "incomplete-checkpoint".
    """
    files = sorted((folder / "ranks").glob("rank-*.json"))
    if not files:
        raise incomplete(folder, "it has no index (ranks/rank-*.json)")
    schema = TypeAdapter(RankIndex)
    for file in files:
        try:
            index = shaped(read_json(file), schema)
        except (OSError, Unreadable) as error:
            first = " ".join(str(error).split())[:200]
            raise incomplete(folder, f"the index ranks/{file.name} cannot be read: {first}") from None
        if len(files) != index.world_size:
            message = f"it was written by {counted(index.world_size, 'rank')}, but has {counted(len(files), 'index')}"
            raise incomplete(folder, message)
        yield index


# errors of reading a file with other values than its program writes
_UNEXPECTED = (LookupError, TypeError, AttributeError, StopIteration, ValueError, ArithmeticError, RuntimeError)


@contextmanager
def expected_content(folder: Path) -> Iterator[None]:
    """Turn errors about a file's unexpected values into UserError "incomplete-checkpoint"."""
    try:
        yield
    except _UNEXPECTED as error:
        reason = f"its files have unexpected content ({type(error).__name__}: {error})"
        raise incomplete(folder, reason) from None


def incomplete(folder: Path, reason: str, hint: str = HINT) -> UserError:
    """Return the error for a checkpoint whose files do not contain the full model."""
    message = f"{folder} is not complete: {reason}"
    return UserError(Problem(kind="incomplete-checkpoint", message=message, hint=hint, where=str(folder)))
