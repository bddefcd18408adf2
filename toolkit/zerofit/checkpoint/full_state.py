"""A checkpoint seen as the whole model, whatever ranks and layout wrote it.

Which file holds which piece of a parameter is said by the ranks that wrote them (`ranks/rank-*.json`, from
`train.fragments.describe`). Nothing here knows a ZeRO stage.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.spec.errors import Problem, UserError

MASTER = "fp32"  # the weights themselves, in the precision in which the optimizer holds them
HINT = "zerofit ckpt verify says which files are damaged; take another checkpoint"


@dataclass(frozen=True)
class TensorParallelSlice:
    """A tensor parallel rank's share: these [start, length] ranges of the whole tensor's `dim`, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, entry: dict[str, Any] | None) -> TensorParallelSlice | None:
        """As it stands in the index; None for a tensor that every rank has whole."""
        return entry and cls(entry["dim"], tuple((start, length) for start, length in entry["ranges"]))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the share."""
        return (*whole[: self.dim], sum(length for _, length in self.ranges), *whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """The share of a whole tensor."""
        return torch.cat([whole.narrow(self.dim, start, length) for start, length in self.ranges], self.dim)

    def put(self, whole: Tensor, share: Tensor) -> None:
        """Write a share into its place in the whole tensor."""
        parts = share.split([length for _, length in self.ranges], self.dim)
        for (start, length), part in zip(self.ranges, parts, strict=True):
            whole.narrow(self.dim, start, length).copy_(part)


@dataclass(frozen=True)
class _StoredShard:
    cut: TensorParallelSlice | None
    start: int  # in the flattened share
    numel: int
    where: dict[str, Any]  # by kind: file, keys, offset


class FullState:
    """Each parameter and optimizer state in its full shape, read from the files when asked for.

    `names` are the parameters in the order of the model, without ties; `ties` maps the other names of a tensor to the
    one in `names`; `counters` holds what is one number a run (`global_steps`, `step`, `loss_scaler`, ...). Raises
    UserError "incomplete-checkpoint" where the files do not cover every element exactly once, "no-whole-view" where
    the layout that wrote it keeps something elsewhere.
    """

    def __init__(self, checkpoint: Path, engine: str = "state"):
        self._folder, self._open = Path(checkpoint), {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_StoredShard]] = defaultdict(list)
        self._buffers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.ties: dict[str, str] = {}
        self.counters: dict[str, Any] = {}
        order: dict[str, None] = {}
        for index in self._indexes(engine):
            self._refuse_unsupported(index)
            order |= dict.fromkeys(index["names"])
            self.ties |= index["ties"]
            self.counters = self.counters or index["counters"]
            for entry in index["parameters"]:
                self._shapes[entry["name"]] = tuple(entry["shape"])
                piece = _StoredShard(
                    TensorParallelSlice.of(entry["cut"]), entry["start"], entry["numel"], entry["where"]
                )
                self._pieces[entry["name"]].append(piece)
            for entry in index["buffers"]:
                self._buffers[entry["name"]].append(entry)
        self.names = list(order)
        self._check_coverage()

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers that belong to the model's state."""
        return list(self._buffers)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's."""
        return self._shapes[self._own(name)]

    def kinds(self, name: str) -> list[str]:
        """What there is of a parameter: "fp32", and the optimizer's states once it has made a step."""
        return list(self._pieces[self._own(name)][0].where)

    def read(self, name: str, kind: str = MASTER) -> Tensor:
        """float32, in the full shape; only this tensor is held in memory."""
        shape = self.shape(name)
        return self.read_flat(name, kind, 0, math.prod(shape)).view(shape)

    def read_flat(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """float32 (numel,), a stretch of the flattened whole tensor; reads no more of the files than needed.

        Where tensor parallel ranks wrote it, the whole tensor is put together first.
        """
        pieces = self._pieces[self._own(name)]
        if any(piece.cut for piece in pieces):
            return self._join(name, kind).view(-1)[start : start + numel]
        out = torch.empty(numel)
        for piece in pieces:
            first, end = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if first < end:
                out[first - start : end - start] = self._stored(piece, kind, first - piece.start, end - first)
        return out

    def buffer(self, name: str) -> Tensor:
        """As the model holds it; batch norm's running statistics as their mean over the ranks."""
        found = [self._tensor(entry["file"], entry["keys"]) for entry in self._buffers[name]]
        if len(found) == 1 or not found[0].is_floating_point():
            return found[0].clone()
        return torch.stack([tensor.double() for tensor in found]).mean(0).to(found[0].dtype)

    def _own(self, name: str) -> str:
        return self.ties.get(name, name)

    def _join(self, name: str, kind: str) -> Tensor:
        shape, shares = self.shape(name), _by_cut(self._pieces[self._own(name)])
        whole = torch.empty(shape)
        for cut, pieces in shares.items():
            share = torch.cat([self._stored(p, kind, 0, p.numel) for p in pieces])
            cut.put(whole, share.view(cut.shape(shape)))
        return whole

    def _stored(self, piece: _StoredShard, kind: str, start: int, numel: int) -> Tensor:
        """float32 (numel,) from `start` of a piece."""
        where = piece.where[kind]
        tensor = self._raw(where) if "raw" in where else self._tensor(where["file"], where["keys"])
        tensor = tensor.detach().reshape(-1)
        first = where["offset"] + start
        if first + numel > tensor.numel():
            raise self._incomplete(
                f"{where['file']} holds {tensor.numel()} elements at {where['keys']}, not {first + numel}"
            )
        return tensor[first : first + numel].float()

    def _raw(self, where: dict[str, Any]) -> Tensor:
        """A file that is nothing but numbers, mapped: DeepSpeed's swap files on NVMe."""
        path, dtype = self._path(where["file"]), getattr(torch, where["raw"])
        if not path.is_file():
            raise self._incomplete(f"{where['file']} is missing")
        return torch.from_file(str(path), size=path.stat().st_size // dtype.itemsize, dtype=dtype)

    def _tensor(self, file: str, keys: list[Hashable]) -> Tensor:
        if file not in self._open:
            self._open[file] = safe_load.load(self._path(file))
        found = self._open[file]
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                raise self._incomplete(f"{file} has nothing at {keys}") from None
        if not isinstance(found, Tensor):
            raise self._incomplete(f"{file} has no tensor at {keys}")
        return found

    def _path(self, file: str) -> Path:
        path = (self._folder / file).resolve()
        if not path.is_relative_to(self._folder.resolve()):
            raise self._incomplete(f"the index names {file}, which lies outside the checkpoint")
        return path

    def _indexes(self, engine: str) -> Iterator[dict[str, Any]]:
        """What each rank said of its files, by rank."""
        files = sorted((self._folder / "ranks").glob("rank-*.json"))
        if not files:
            raise self._incomplete("there is no index (ranks/rank-*.json)")
        try:
            said = [json.loads(file.read_text()) for file in files]
        except ValueError as error:
            raise self._incomplete(f"an index in ranks/ cannot be read: {error}") from None
        if len(said) != said[0]["world_size"]:
            raise self._incomplete(
                f"{said[0]['world_size']} ranks wrote it, and there are {len(said)} of their indexes"
            )
        for one in said:
            if engine not in one["engines"]:
                raise self._incomplete(f"there is no engine {engine!r}: there are {', '.join(one['engines'])}")
            yield one["engines"][engine]

    def _refuse_unsupported(self, index: dict[str, Any]) -> None:
        if reason := index["unsupported"]:
            message = f"{self._folder} has no view of the whole model: {reason}"
            hint = "go on in the layout that wrote it, then save in another one"
            raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where=str(self._folder)))

    def _check_coverage(self) -> None:
        """Every element of every kind exactly once."""
        for name in self.names:
            pieces = self._pieces[name]
            if not pieces or any(set(piece.where) != set(pieces[0].where) for piece in pieces):
                raise self._incomplete(f"{name} has pieces missing")
            shares = _by_cut(pieces)
            for cut, share in shares.items():
                shape = cut.shape(self._shapes[name]) if cut else self._shapes[name]
                if not _tiles([(p.start, p.numel) for p in share], math.prod(shape)):
                    raise self._incomplete(f"the pieces of {name} do not cover it exactly once")
            if None in shares and len(shares) > 1:
                raise self._incomplete(f"{name} is there both whole and cut")
            if None not in shares and not _complete(list(shares), self._shapes[name]):
                raise self._incomplete(f"the tensor parallel shares of {name} do not cover it exactly once")

    def _incomplete(self, reason: str) -> UserError:
        message = f"{self._folder} is not complete: {reason}"
        return UserError(Problem(kind="incomplete-checkpoint", message=message, hint=HINT, where=str(self._folder)))


def _by_cut(pieces: list[_StoredShard]) -> dict[Any, list[_StoredShard]]:
    """The pieces of each share, in order."""
    shares: dict[TensorParallelSlice | None, list[_StoredShard]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda p: p.start):
        shares[piece.cut].append(piece)
    return shares


def _complete(cuts: list[TensorParallelSlice], shape: tuple[int, ...]) -> bool:
    dims = {cut.dim for cut in cuts}
    ranges = sorted(one for cut in cuts for one in cut.ranges)
    return len(dims) == 1 and _tiles(ranges, shape[dims.pop()])


def _tiles(stretches: list[tuple[int, int]], total: int) -> bool:
    """Whether sorted (start, length) stretches follow each other from 0 to `total`."""
    end = 0
    for start, length in stretches:
        if start != end or length <= 0:
            return False
        end += length
    return end == total
