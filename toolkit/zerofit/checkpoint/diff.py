"""Comparison of two checkpoints or folders of safetensors, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.direct_io import equal, wider
from zerofit.checkpoint.full_state import FullState, full_model
from zerofit.checkpoint.index import MASTER
from zerofit.checkpoint.store import locate
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter

# Two numbers are equal only if their bits are: floats are compared as integers of the same width, so NaNs with equal
# bits count as equal and +0 and -0 as different.
PIECE = 1 << 22  # elements compared at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """The difference between two tensors, after conversion to the wider type."""

    name: str
    kind: str  # "fp32" for the tensor itself, or an optimizer state
    elements: int
    apart: int  # elements whose bits differ
    max_abs: float  # the largest |a - b|; infinite if one of them is not finite
    max_rel: float  # the largest |a - b| / max(|a|, |b|)


@dataclass(kw_only=True)
class CheckpointDiff:
    """The differences between two checkpoints or models."""

    a: Path
    b: Path
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    rows: list[TensorRow] = field(default_factory=list)  # of the compared tensors

    @property
    def equal(self) -> bool:
        """Whether both sides have the same names, shapes and values."""
        return not (self.only_in_a or self.only_in_b or self.shapes or self.apart)

    @property
    def apart(self) -> list[TensorRow]:
        """Tensors that are not bit for bit equal, the largest difference first."""
        return sorted((row for row in self.rows if row.apart), key=lambda row: -row.max_abs)

    def to_dict(self) -> dict[str, object]:
        """Return `zerofit ckpt diff --json`. Equal tensors are counted but not listed."""
        apart = self.apart
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.equal,
            "compared": len(self.rows),
            "identical": len(self.rows) - len(apart),
            "max_abs": _finite(max((row.max_abs for row in apart), default=0.0)),
            "max_rel": _finite(max((row.max_rel for row in apart), default=0.0)),
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "shapes": [{"name": name, "a": list(a), "b": list(b)} for name, a, b in self.shapes],
            "tensors": [
                {**vars(row), "max_abs": _finite(row.max_abs), "max_rel": _finite(row.max_rel)} for row in apart
            ],
        }


def diff(a: Path, b: Path, states: bool = False, report: Reporter | None = None) -> CheckpointDiff:
    """Compare two folders or files: runs, checkpoints, exported models, or safetensors.

    With `states`, also compare optimizer states, which only checkpoints have. Only one tensor of each side is in memory
    at a time. Raises UserError if a side cannot be read.
    """
    report = report or Reporter()
    left, right = open_side(a, "A", states), open_side(b, "B", states)
    for side, path in ((left, a), (right, b)):
        if states and isinstance(side, FullState) and side.notes and not side.has_states:
            hint = "compare two checkpoints, or leave --states out"
            raise UserError(Problem(kind="no-states", message=f"{path}: {side.notes[0]}", hint=hint))
    difference, names = CheckpointDiff(a=a, b=b), list(dict.fromkeys([*left.tensors, *right.tensors]))
    left_names, right_names = set(left.tensors), set(right.tensors)
    for done, name in enumerate(names, start=1):
        report.status(f"comparing {name} ({done} of {len(names)})")
        left_name, right_name = left.ties.get(name, name), right.ties.get(name, name)  # tied tensors are stored once
        if left_name not in left_names or right_name not in right_names:
            (difference.only_in_b if left_name not in left_names else difference.only_in_a).append(name)
        elif left.shape(left_name) != right.shape(right_name):
            difference.shapes.append((name, left.shape(left_name), right.shape(right_name)))
        else:
            _compare_kinds(name, (left, left_name), (right, right_name), states, difference)
    return difference


def open_side(path: Path, where: str, states: bool) -> TensorSource:
    """Open one side of a comparison: a folder or a file. Raises UserError.

    With `states`, weights in safetensors are opened together with the optimizer's file next to them.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] * (path.suffix == ".safetensors")
    if files and not states:
        return SafetensorsFiles(files)
    checkpoint = locate(path, where)
    return full_model(checkpoint)


class SafetensorsFiles:
    """Tensors of safetensors files, with the interface of `FullState`."""

    def __init__(self, files: list[Path]):
        self._file = {name: content for content in map(safe_load.load, files) for name in content}
        self.tensors: list[str] = list(self._file)
        self.ties: dict[str, str] = {}

    def kinds(self, name: str) -> list[str]:
        """Return `[MASTER]`: safetensors files have no optimizer states."""
        return [MASTER]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._file[name].shape(name)

    def read(self, name: str, kind: str) -> Tensor:
        """Return a tensor."""
        return self._file[name][name]


TensorSource = FullState | SafetensorsFiles


def _compare_kinds(
    name: str, a: tuple[TensorSource, str], b: tuple[TensorSource, str], states: bool, difference: CheckpointDiff
) -> None:
    kinds_a, kinds_b = ((side.kinds(side_name) if states else [MASTER]) for side, side_name in (a, b))
    for kind in dict.fromkeys([*kinds_a, *kinds_b]):
        if kind not in kinds_a or kind not in kinds_b:
            (difference.only_in_b if kind not in kinds_a else difference.only_in_a).append(f"{name} ({kind})")
        else:
            (left, left_name), (right, right_name) = a, b
            difference.rows.append(compare(name, kind, left.read(left_name, kind), right.read(right_name, kind)))


def compare(name: str, kind: str, a: Tensor, b: Tensor) -> TensorRow:
    """Return the difference between two tensors of the same shape."""
    apart, max_abs, max_rel = 0, 0.0, 0.0
    common = wider(a.dtype, b.dtype)
    for pair in zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True):
        # the wider type: an element of a bf16 export equals its fp32 master weight if rounding did not change it
        x, y = (piece.to(common).contiguous() for piece in pair)
        x_bits, y_bits = x.view(BITS[x.itemsize]), y.view(BITS[y.itemsize])
        if not equal(x_bits, y_bits):  # most are equal, and one thread finds out with the least CPU time
            differ = x_bits != y_bits
            apart += int(differ.sum())
            exact = torch.complex128 if common.is_complex else torch.float64
            x, y = x[differ].to(exact), y[differ].to(exact)
            gap = (x - y).abs()
            max_abs = max(max_abs, _largest(gap))
            # +0 and -0 differ in their bits, but their gap is 0, and 0 / 0 would be NaN.
            max_rel = max(max_rel, _largest(torch.where(gap == 0, gap, gap / torch.maximum(x.abs(), y.abs()))))
    return TensorRow(name=name, kind=kind, elements=a.numel(), apart=apart, max_abs=max_abs, max_rel=max_rel)


def _largest(values: Tensor) -> float:
    return math.inf if values.isnan().any() else values.max().item()


def _finite(value: float) -> float | None:
    """Return a value, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
