"""Two checkpoints, or folders of safetensors, compared tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerofit.checkpoint.contents import CheckpointTensors
from zerofit.checkpoint.locate import locate, manifest_of
from zerofit.spec.errors import Problem, UserError

PIECE = 1 << 22  # elements compared at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WEIGHTS = "fp32"


class TensorSource(Protocol):
    """What is compared: tensors by name, each with its kinds ("fp32", and optimizer states)."""

    names: list[str]  # of every tensor that is held, without ties
    ties: dict[str, str]

    def kinds(self, name: str) -> list[str]:
        """What is held of a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape."""

    def read(self, name: str, kind: str) -> Tensor:
        """It, whole."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """How one tensor differs; `apart` counts elements that are not equal bit for bit in the wider type."""

    name: str
    kind: str  # "fp32" (the tensor itself), or an optimizer state
    elements: int
    apart: int
    max_abs: float  # the largest |a - b|; infinite where one of them is not finite
    max_rel: float  # the largest |a - b| / max(|a|, |b|)


@dataclass(kw_only=True)
class CheckpointDiff:
    """All that differs."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    rows: list[TensorRow] = field(default_factory=list)  # of every tensor that could be compared

    @property
    def equal(self) -> bool:
        """Whether both hold the same names, shapes and numbers."""
        return not (self.only_in_a or self.only_in_b or self.shapes or any(row.apart for row in self.rows))


def diff(a: Path, b: Path, states: bool = False, progress: Callable[[str], None] = lambda _: None) -> CheckpointDiff:
    """Compare two of: a run's folder, a checkpoint's, an exported model's, any folder of safetensors.

    With `states` the optimizer's too, which only checkpoints hold. One tensor of each side is in memory at a time.
    Raises UserError where a side cannot be read.
    """
    left, right = open_side(a, "A"), open_side(b, "B")
    if states and not all(isinstance(side, _Checkpoint) for side in (left, right)):
        hint = "compare two checkpoints, or leave --states out"
        raise UserError(Problem(kind="no-states", message="a model's folder holds no optimizer states", hint=hint))
    found, names = CheckpointDiff(), list(dict.fromkeys([*left.names, *right.names]))
    for done, name in enumerate(names, start=1):
        progress(f"comparing {name} ({done} of {len(names)})")
        mine, other = _held(left, name), _held(right, name)
        if mine is None or other is None:
            (found.only_in_b if mine is None else found.only_in_a).append(name)
        elif left.shape(mine) != right.shape(other):
            found.shapes.append((name, left.shape(mine), right.shape(other)))
        else:
            _compare_kinds(name, (left, mine), (right, other), states, found)
    return found


def open_side(path: Path, where: str) -> TensorSource:
    """What lies at a path. Raises UserError."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] * (path.suffix == ".safetensors")
    return _Safetensors(files, where) if files else _Checkpoint(locate(path, where))


class _Checkpoint:
    def __init__(self, path: Path):
        self._held = CheckpointTensors(path, manifest_of(path))
        self.names, self.ties = [*self._held.names, *self._held.buffers], self._held.ties
        self._buffers = set(self._held.buffers)

    def kinds(self, name: str) -> list[str]:
        return [WEIGHTS] if name in self._buffers else self._held.kinds(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._held.buffer(name).shape) if name in self._buffers else self._held.shape(name)

    def read(self, name: str, kind: str) -> Tensor:
        return self._held.buffer(name) if name in self._buffers else self._held.read(name, kind)


class _Safetensors:
    def __init__(self, files: list[Path], where: str):
        try:
            opened = [safe_open(file, framework="pt") for file in files]
        except (SafetensorError, OSError) as error:
            message = f"{files[0].parent} holds a file that is no safetensors file: {error}"
            raise UserError(Problem(kind="damaged-file", message=message, where=where)) from None
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.names: list[str] = list(self._file)
        self.ties: dict[str, str] = {}

    def kinds(self, name: str) -> list[str]:
        return [WEIGHTS]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file[name].get_slice(name).get_shape())

    def read(self, name: str, kind: str) -> Tensor:
        return self._file[name].get_tensor(name)


def _held(side: TensorSource, name: str) -> str | None:
    """The name under which a side holds a tensor: its own or the one that it is tied to."""
    name = side.ties.get(name, name)
    return name if name in side.names else None


def _compare_kinds(
    name: str, a: tuple[TensorSource, str], b: tuple[TensorSource, str], states: bool, found: CheckpointDiff
) -> None:
    kinds_a, kinds_b = ((side.kinds(held) if states else [WEIGHTS]) for side, held in (a, b))
    for kind in dict.fromkeys([*kinds_a, *kinds_b]):
        if kind not in kinds_a or kind not in kinds_b:
            (found.only_in_b if kind not in kinds_a else found.only_in_a).append(f"{name} ({kind})")
        else:
            (left, mine), (right, other) = a, b
            found.rows.append(compare(name, kind, left.read(mine, kind), right.read(other, kind)))


def compare(name: str, kind: str, a: Tensor, b: Tensor) -> TensorRow:
    """How two tensors of one shape differ."""
    apart, max_abs, max_rel = 0, 0.0, 0.0
    for x, y in _pieces(a, b):
        differ = x.view(BITS[x.itemsize]) != y.view(BITS[y.itemsize])
        apart += int(differ.sum())
        if differ.any():
            x, y = x[differ].double(), y[differ].double()
            gap = (x - y).abs()
            max_abs = max(max_abs, _largest(gap))
            max_rel = max(max_rel, _largest(torch.where(gap == 0, gap, gap / torch.maximum(x.abs(), y.abs()))))
    return TensorRow(name=name, kind=kind, elements=a.numel(), apart=apart, max_abs=max_abs, max_rel=max_rel)


def _largest(values: Tensor) -> float:
    return math.inf if values.isnan().any() else values.max().item()


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both flattened, in pieces of the wider of the two types."""
    wider = torch.promote_types(a.dtype, b.dtype)
    pairs = zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True)
    return ((x.to(wider).contiguous(), y.to(wider).contiguous()) for x, y in pairs)
