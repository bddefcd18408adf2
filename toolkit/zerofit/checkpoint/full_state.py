"""A checkpoint as the full model, independent of the ranks and the layout that wrote it.

Each rank's index (`ranks/rank-*.json`, from `train.shard_index`) lists the file of each shard of a parameter. This
module does not depend on ZeRO stages.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.deepspeed_index import deepspeed_index
from zerofit.checkpoint.direct_file import PIECE
from zerofit.checkpoint.direct_io import wider
from zerofit.checkpoint.foreign import Foreign, foreign_at
from zerofit.checkpoint.index import (
    MASTER,
    Location,
    ParameterGroup,
    RankIndex,
    SavedBuffer,
    Shard,
    TensorSlice,
    expected_content,
    incomplete,
    read_ranks,
)
from zerofit.checkpoint.model_folder import LazyTensor
from zerofit.checkpoint.safe_load import SAFETENSORS
from zerofit.checkpoint.store import MANIFEST, STATE, manifest_of
from zerofit.checkpoint.torch_files import distributed_index, state_dict_index, universal_index
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import stays_inside
from zerofit.spec.run import Run

# How a full tensor is assembled from the files of many ranks, in two levels:
#
#     full tensor   =  cuts of tensor or expert parallel ranks, each some ranges of rows or columns (`TensorSlice`)
#     a flat cut    =  stretches of data parallel ranks, one after another (`Shard`: start, numel)
#
# A part of a tensor is read directly from the stretches that overlap it, in memory-mapped files. Each element is read
# once, also if many ranks' files are written from it.
UNREADABLE_STATES = "only the optimizer that wrote the optimizer states (bitsandbytes, Adafactor, ...) can load them"
ONE_ENGINE = {STATE: ""}
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# each network of a GAN has its own engine: its name, and the prefix of its parameters' names in the pair
GAN_ENGINES = {"generator": "generator.", STATE: "discriminator."}


class FullState:
    """All parameters, optimizer states and buffers in full shape, read from the files on demand.

    `engines` maps each engine to the prefix of its parameters in the model. `names` are the parameters in the model's
    order, without ties. `ties` maps other names of a tensor to its name in `names`. `counters` has the scalars of the
    run (`global_steps`, `step`, `loss_scaler`, ...). `notes` describe data that the files lack. With `repair` the data
    of a lost rank is replaced, if other files have the weights; `repaired` lists these replacements. `run` is the run
    that loads the checkpoint, if there is one. Raises UserError "incomplete-checkpoint" if the files do not cover every
    element exactly once or an index is invalid, and "no-whole-view" if the layout does not save all state.
    """

    def __init__(
        self, checkpoint: Path, engines: Mapping[str, str] = ONE_ENGINE, repair: bool = False, run: Run | None = None
    ):
        self._folder, self._open = Path(checkpoint), {}
        self._own = (self._folder / "ranks").is_dir()
        self._chunks: dict[tuple[str, tuple[int, int]], object] = {}  # at most `_most_chunks` separate tensors
        self._most_chunks = 1
        self.notes: list[str] = []
        self.repaired: list[str] = []
        self.groups: list[ParameterGroup] = []
        self.ties: dict[str, str] = {}
        self.counters: dict[str, Any] = {}
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        self._buffers: dict[str, list[SavedBuffer]] = defaultdict(list)
        with expected_content(self._folder):
            self.names = self._collect(_indexes(self._folder, run), engines, repair)
            self._check_names()
            self._check_coverage()
        if self.counters.get("step") is not None and not self.has_states:
            self.counters["step"] = None
            self.notes = self.notes or [UNREADABLE_STATES]

    def _collect(self, indexes: Iterable[RankIndex], engines: Mapping[str, str], repair: bool) -> list[str]:
        order: dict[str, None] = {}
        for rank in indexes:
            for engine, prefix in engines.items():
                if engine not in rank.engines:
                    raise self._incomplete(f"it has no engine {engine!r}, only {', '.join(rank.engines)}")
                index = rank.engines[engine]
                if index.unsupported:
                    message = f"{self._folder} cannot be read as a full model: {index.unsupported}"
                    hint = "resume in the layout that wrote it, then save in another layout"
                    raise UserError(Problem(kind="no-whole-view", message=message, hint=hint, where=str(self._folder)))
                full_name = partial(_full_name, prefix, self._own)
                order |= dict.fromkeys(full_name(name) for name in index.names)
                self.ties |= {full_name(name): full_name(source) for name, source in index.ties.items()}
                self.counters = self.counters or index.counters
                if index.lost and not repair:
                    raise self._incomplete(f"{', '.join(index.lost)} is missing")
                if index.lost:
                    copied = "its weights are copied from the 16-bit weights, and its optimizer states are zero"
                    self.repaired += [f"{file} is missing: {copied}" for file in index.lost]
                self.notes += index.notes
                self.groups += [
                    replace(group, names=[full_name(name) for name in group.names]) for group in index.groups
                ]
                for shard in index.parameters:
                    self._shards[full_name(shard.name)].append(shard)
                for buffer in index.buffers:
                    self._buffers[full_name(buffer.name)].append(buffer)
        return list(order)

    def match(self, wanted: Iterable[str]) -> None:
        """Remove the prefix that a wrapper has added to the names.

        Such prefixes are "module." or "_forward_module.model.". `wanted`: the names without the prefix.
        """
        wanted = list(wanted)
        if not wanted:
            return
        saved = {*self.names, *self._buffers, *self.ties}
        ends = {name.removesuffix(wanted[0]) for name in saved if name.endswith(wanted[0])}
        # Several names may end like the first wanted one. Only a prefix that fits all wanted names is the wrapper's.
        prefix = next((p for p in sorted(ends, key=len) if all(p + name in saved for name in wanted)), "")
        self.names = [name.removeprefix(prefix) for name in self.names]
        self.ties = {name.removeprefix(prefix): source.removeprefix(prefix) for name, source in self.ties.items()}
        self.groups = [replace(g, names=[name.removeprefix(prefix) for name in g.names]) for g in self.groups]
        self._shards = {name.removeprefix(prefix): shards for name, shards in self._shards.items()}
        self._buffers = {name.removeprefix(prefix): buffers for name, buffers in self._buffers.items()}

    @property
    def buffers(self) -> list[str]:
        """Names of the persistent buffers."""
        return list(self._buffers)

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors of the state dict, without ties."""
        return [*self.names, *self._buffers]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full tensor's shape."""
        return tuple(self.buffer(name).shape) if name in self._buffers else self._shards_of(name)[0].shape

    def numel(self, name: str) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape(name))

    def kinds(self, name: str) -> list[str]:
        """List the kinds of a tensor: "fp32" and, for parameters, the optimizer's states."""
        return [MASTER] if name in self._buffers else list(self._shards_of(name)[0].where)

    @property
    def has_states(self) -> bool:
        """Whether any parameter has optimizer states."""
        return any(len(self.kinds(name)) > 1 for name in self.names)

    def shares(self, name: str) -> list[list[Shard]]:
        """Return the stretches of a parameter: one list per tensor parallel rank."""
        return list(_by_cut(self._shards_of(name)).values())

    def read(self, name: str, kind: str = MASTER, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a parameter or state in full shape as `dtype`, or a buffer. Reads only this."""
        if name in self._buffers:
            return self.buffer(name)
        shape = self.shape(name)
        return self.read_flat(name, kind, 0, self.numel(name), dtype).view(shape)

    @property
    def saved_dtype(self) -> torch.dtype:
        """The narrowest type that represents all master weights."""
        dtypes = []
        for name in self.names:
            shard = self._shards_of(name)[0]
            known = shard.where[MASTER].dtype
            # no elements are read, only the type
            dtypes.append(getattr(torch, known) if known else self._stored(shard, MASTER, 0, 0).dtype)
        return reduce(wider, dtypes)

    def read_flat(self, name: str, kind: str, start: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a part of the flattened full tensor, (numel,). Only this part is read."""
        out = torch.empty(numel, dtype=dtype)
        self.fill(name, kind, out, start)
        return out

    def fill(self, name: str, kind: str, out: Tensor, start: int = 0) -> None:
        """Read a part of the flattened full tensor into `out`. Only this part is read."""
        shards = self._shards_of(name)
        shares, shape, end = _by_cut(shards), shards[0].shape, start + len(out)
        self._most_chunks = len(shares)
        if None in shares:
            self.fill_share(shares[None], kind, out, start)
            return
        dim = next(cut.dim for cut in shares if cut is not None)
        row, done = math.prod(shape[dim:]), start
        while done < end:
            # full rows are copied together; a row that is cut or large is copied range by range
            # The limit of PIECE // 4 elements is PIECE bytes in float32.
            rows = 0 if done % row else min(end - done, PIECE // 4) // row
            stop = done + rows * row if rows else min(end, done - done % row + row)
            for cut, share in shares.items():
                assert cut is not None  # see _check_coverage
                part = out[done - start : stop - start]
                if rows:
                    cut_rows = self._read_share(share, kind, rows, done // row, cut.shape(shape)[dim:])
                    replace(cut, dim=1).put(part.view(rows, *shape[dim:]), cut_rows)
                else:
                    self._fill_row(share, kind, part, done, cut)
            done = stop

    def _read_share(self, share: list[Shard], kind: str, rows: int, first: int, shape: tuple[int, ...]) -> Tensor:
        """Return `rows` rows of a share, from row `first` on: (rows, *shape)."""
        out = torch.empty(rows, *shape)
        self.fill_share(share, kind, out.view(-1), first * math.prod(shape))
        return out

    def _fill_row(self, share: list[Shard], kind: str, out: Tensor, start: int, cut: TensorSlice) -> None:
        """Fill `out`, a part of a tensor's row, from a share.

        `start`: index of `out` in the flattened full tensor.
        """
        shape, end = share[0].shape, start + len(out)
        row, unit = math.prod(shape[cut.dim :]), math.prod(shape[cut.dim + cut.joined + 1 :])
        # offsets of the row in the full tensor, and of the row's next range in the share
        row_start, offset = start // row * row, start // row * math.prod(cut.shape(shape)[cut.dim :])
        for begin, length in cut.ranges:
            first, last = max(start, row_start + begin * unit), min(end, row_start + (begin + length) * unit)
            if first < last:
                skipped = first - row_start - begin * unit
                self.fill_share(share, kind, out[first - start : last - start], offset + skipped)
            offset += length * unit

    def fill_share(self, share: list[Shard], kind: str, out: Tensor, start: int) -> None:
        """Read a part of a flattened share, or of an uncut tensor, into `out`."""
        end = start + len(out)
        for shard in share:
            first, last = max(start, shard.start), min(end, shard.start + shard.numel)
            if first < last:
                part = self._stored(shard, kind, first - shard.start, last - first)
                safe_load.copy_numbers(out[first - start : last - start], part)

    def source(self, name: str) -> Tensor | LazyTensor:
        """Return a buffer, or a LazyTensor that reads a parameter later.

        If the parameter can be read in pieces, its files are opened now. Several threads may read the pieces later.
        """
        if name in self._buffers:
            return self.buffer(name)
        shards = self._shards_of(name)
        in_pieces = not any(s.where[MASTER].span or s.where[MASTER].file.endswith(SAFETENSORS) for s in shards)
        for shard in shards if in_pieces else ():
            self._stored(shard, MASTER, 0, 0)
        return LazyTensor(shape=self.shape(name), fill=partial(self.fill, name, MASTER), in_pieces=in_pieces)

    def buffer(self, name: str) -> Tensor:
        """Return a buffer. For batch norm's running statistics, return the mean over the ranks."""
        if (shape := self._buffers[name][0].full) is not None:
            return self._joined(name, shape)
        copies = [self._tensor(entry) for entry in self._buffers[name]]
        # counters, such as batch norm's num_batches_tracked, have no mean
        if not copies[0].is_floating_point() or all(torch.equal(copies[0], other) for other in copies[1:]):
            return copies[0].clone()
        if any(tensor.shape != copies[0].shape for tensor in copies):
            raise self._incomplete(f"the ranks saved {name} in different shapes")
        # Each rank's batch norms have seen only the samples of this rank.
        return torch.stack([tensor.double() for tensor in copies]).mean(0).to(copies[0].dtype)

    def _joined(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer whose blocks are stored separately."""
        blocks = [(entry.offsets, self._tensor(entry)) for entry in self._buffers[name]]
        full = torch.empty(shape, dtype=blocks[0][1].dtype)
        for offsets, block in blocks:
            place = full[tuple(slice(o, o + size) for o, size in zip(offsets, block.shape, strict=False))]
            if place.shape != block.shape:
                raise self._incomplete(f"a block of {name} is outside of it")
            place.copy_(block)
        if sum(block.numel() for _, block in blocks) != full.numel():
            raise self._incomplete(f"the blocks of {name} do not cover its {full.numel()} elements exactly once")
        return full

    def _shards_of(self, name: str) -> list[Shard]:
        return self._shards[self.ties.get(name, name)]

    def _stored(self, shard: Shard, kind: str, start: int, numel: int) -> Tensor:
        """Return (numel,) elements of a shard, mapped into memory, in the file's type."""
        where = shard.where[kind]
        if where.lost:
            return torch.zeros(numel)
        # mapped, so only the pages of this stretch are read from disk
        if where.raw:  # DeepSpeed's swap files on NVMe
            path, dtype = self._path(where.file), getattr(torch, where.raw)
            if not path.is_file():
                raise self._incomplete(f"{where.file} is missing")
            tensor = torch.from_file(str(path), size=path.stat().st_size // dtype.itemsize, dtype=dtype)
        else:
            tensor = self._tensor(where).detach().reshape(-1)
        first = where.offset + start
        if first + numel > tensor.numel():
            raise self._incomplete(f"{where.file} has {tensor.numel()} elements at {where.keys}, not {first + numel}")
        return tensor[first : first + numel]

    def _tensor(self, where: Location | SavedBuffer) -> Tensor:
        value = self._opened(where)
        for key in where.keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._incomplete(f"{where.file} has nothing at {where.keys}") from None
        if not isinstance(value, Tensor):
            raise self._incomplete(f"{where.file} has no tensor at {where.keys}")
        return value

    def _opened(self, where: Location | SavedBuffer) -> Any:
        """Return the content of a file, or of a torch file within it."""
        if where.span:  # a separate tensor; only one is in memory, or one of each share of a tensor
            key = (where.file, where.span)
            while key not in self._chunks and len(self._chunks) >= self._most_chunks:
                self._chunks.pop(next(iter(self._chunks)))
            if key not in self._chunks:
                self._chunks[key] = safe_load.load(self._path(where.file), span=where.span)
            return self._chunks[key]
        if where.file not in self._open:
            self._open[where.file] = safe_load.load(self._path(where.file))
        return self._open[where.file]

    def _path(self, file: str) -> Path:
        root = self._folder if self._folder.is_dir() else self._folder.parent
        path = root / file
        # in other programs' folders a file may be a link, as in the cache of Hugging Face's hub
        if not stays_inside(file) or (self._own and not path.resolve().is_relative_to(root.resolve())):
            raise self._incomplete(f"the index names {file!r}, which is outside the checkpoint")
        return path.resolve()

    # `convert` writes files with these names.
    def _check_names(self) -> None:
        """Raise an error for names that point outside the folder."""
        kinds = {kind for shards in self._shards.values() for shard in shards for kind in shard.where}
        for name in (*self.names, *self._buffers, *self.ties, *kinds):
            if not stays_inside(name):
                raise self._incomplete(f"the index has a tensor named {name!r}")

    def _check_coverage(self) -> None:
        """Raise an error for parameters with missing or duplicate elements."""
        for name in self.names:
            shards = self._shards.get(name)
            if not shards or any(s.where.keys() != shards[0].where.keys() for s in shards):
                raise self._incomplete(f"shards of {name} are missing")
            shape, shares = shards[0].shape, _by_cut(shards)
            if MASTER not in shards[0].where or any(s.shape != shape for s in shards):
                raise self._incomplete(f"the shards of {name} do not belong to one tensor")
            if not _are_one_tensor(shares, shape):
                raise self._incomplete(f"the shares of {name} do not cover it exactly once")
            for cut, share in shares.items():
                total = math.prod(cut.shape(shape) if cut else shape)
                if not _tiles([(shard.start, shard.numel) for shard in share], total):
                    raise self._incomplete(f"the shards of {name} do not cover its {total} elements exactly once")

    def _incomplete(self, reason: str) -> UserError:
        return incomplete(self._folder, reason)


# format -> function that builds the index of another program's checkpoint; the other formats are state dicts
FOREIGN: dict[str, Callable[[Foreign], RankIndex]] = {
    "deepspeed": deepspeed_index,
    "dcp": distributed_index,
    "universal": universal_index,
}


def _indexes(checkpoint: Path, run: Run | None) -> Iterable[RankIndex]:
    """Return the index of each rank: zerofit's own, or built for another program's checkpoint."""
    found = None if (checkpoint / "ranks").is_dir() else foreign_at(checkpoint)
    if found and found.format in ("torch", "safetensors"):
        return [state_dict_index(found, run)]
    return [FOREIGN[found.format](found)] if found else read_ranks(checkpoint)


def full_model(checkpoint: Path) -> FullState:
    """Open a checkpoint with tensors named as in the model's state_dict."""
    is_own = (checkpoint / MANIFEST).is_file()
    gan = is_own and manifest_of(checkpoint).job.facts.task == "gan"
    return FullState(checkpoint, GAN_ENGINES if gan else ONE_ENGINE)


def _full_name(prefix: str, own: bool, name: str) -> str:
    """Return the name without torch.compile's, FSDP 1's and checkpointing's wrappers."""
    return prefix + (name if own else WRAPPERS.sub("", name))


def _by_cut(shards: list[Shard]) -> dict[TensorSlice | None, list[Shard]]:
    shares: dict[TensorSlice | None, list[Shard]] = defaultdict(list)
    # sorted, since `_tiles` compares each stretch with the end of the one before
    for shard in sorted(shards, key=lambda s: s.start):
        shares[shard.cut].append(shard)
    return shares


def _are_one_tensor(shares: Mapping[TensorSlice | None, object], shape: tuple[int, ...]) -> bool:
    """Return whether the shares are the full tensor, or cover one dimension without gaps."""
    cuts = [cut for cut in shares if cut is not None]
    if not cuts:
        return True
    dims = {(cut.dim, cut.joined) for cut in cuts}  # all cuts are along one dimension
    ranges = sorted(span for cut in cuts for span in cut.ranges)
    if len(cuts) != len(shares) or len(dims) != 1 or sum(max(dims)) >= len(shape):
        return False
    return _tiles(ranges, cuts[0].length(shape))


def _tiles(stretches: list[tuple[int, int]], total: int) -> bool:
    """Return whether sorted (start, length) ranges cover 0 to `total` without gaps and overlaps."""
    end = 0
    for start, length in stretches:
        if start != end or length <= 0 < total:  # only a tensor without elements has an empty stretch
            return False
        end += length
    return end == total
