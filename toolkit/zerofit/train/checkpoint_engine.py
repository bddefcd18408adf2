"""The way of DeepSpeed's checkpoint files to disk: its own interface of checkpoint engines, with synced files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy as shallow
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.store import FileMark, mark_of
from zerofit.spec.files import sync_file

MODEL_FILES = "model_states.pt"
SYNCING = 2  # files being synced and hashed while the next one is written


class SyncedCheckpointEngine(CheckpointEngine):
    """Writes files at once, or (between `begin_snapshot` and `take_snapshot`) keeps copies of it.

    A failure to write is kept until `marks` instead of raised: the other ranks are in the midst of the same save, and
    would wait for this one.
    """

    def __init__(self, zero_stage: int) -> None:
        super().__init__()
        self._copied = zero_stage > 0  # what a file of the model's holds; at stage 0 the optimizer's states lie in it
        self.name = "zerofit"
        self._copies = HostCopies()
        self._snapshot: list[tuple[Any, Path]] | None = None
        self._pool = ThreadPoolExecutor(SYNCING, thread_name_prefix="sync")
        self._marks: dict[Path, Future[FileMark]] = {}
        self._failure: Exception | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: DeepSpeed is about to save."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: DeepSpeed has saved, and the Saver shows the checkpoint once all ranks' files are whole."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return whether DeepSpeed must clone views before it hands them on: copies are whole tensors in any case."""
        return self._snapshot is None

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write what torch.save writes, or keep a copy of it."""
        if self._snapshot is not None:
            self._snapshot.append((self._copies.of(state_dict, Path(path).name), Path(path)))
        else:
            self._write(state_dict, Path(path))

    def load(self, path: str | Path, map_location: Any = None) -> Any:
        """Read a file without running anything that lies in it. Raises UserError for one that asks for more.

        What DeepSpeed copies into its parameters is left on the disk until then; optimizers on a CPU would go on with
        the mapped file itself.
        """
        return safe_load.load(path, mmap=self._copied and str(path).endswith(MODEL_FILES), for_engine=True)

    def begin_snapshot(self) -> None:
        """Take copies from now on; what is trained on may change afterwards."""
        self._snapshot = []

    def take_snapshot(self) -> list[tuple[Any, Path]]:
        """Return what was saved since `begin_snapshot`, for `write_snapshot` in another thread."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a device may still be making copies
        snapshot, self._snapshot = self._snapshot or [], None
        return snapshot

    def write_snapshot(self, snapshot: list[tuple[Any, Path]]) -> None:
        """Write what was copied."""
        for state_dict, path in snapshot:
            self._write(state_dict, path)

    def marks(self) -> dict[Path, FileMark]:
        """Return sizes and hashes of all files since the last call, each on the disk by now. Raises OSError."""
        marks, self._marks = self._marks, {}
        failure, self._failure = self._failure, None
        found = {path: mark.result() for path, mark in marks.items() if failure is None}
        if failure:
            raise OSError(str(failure)) from failure
        return found

    def _write(self, state_dict: Any, path: Path) -> None:
        if self._failure:
            return
        try:
            with _without_crc():
                torch.save(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's writer has no errno to tell
            self._failure = error
            return
        self._marks[path] = self._pool.submit(_synced, path)


@contextmanager
def _without_crc() -> Iterator[None]:
    """Keep torch from computing a CRC32 of each tensor, as slow as writing it; the manifest's hash says more."""
    former = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(former)


def _synced(path: Path) -> FileMark:
    """Hash what can be read back of a file, and sync it so that it stays."""
    mark = mark_of(path)
    sync_file(path)
    return mark


class HostCopies:
    """Copies of state dicts in host memory, which are written while training changes the originals.

    Keeps its buffers from one checkpoint to the next: the first touch of memory costs as much as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def of(self, value: Any, file: str) -> Any:
        """Return the structure with every tensor copied; tensors that are one stay one. `file` names the structure."""
        copies: dict[tuple[object, ...], Tensor] = {}  # by address, offset, shape and strides

        def copy(item: Any) -> Any:
            if isinstance(item, Tensor):
                key = (item.data_ptr(), item.storage_offset(), item.shape, item.stride())
                if key not in copies or not item.numel():
                    copies[key] = self._copy(item, (file, len(copies)))
                return copies[key]
            if isinstance(item, dict):
                same = shallow(item)
                same.update((key, copy(part)) for key, part in item.items())
                return same
            if type(item) in (list, tuple):
                return type(item)(copy(part) for part in item)
            return item

        return copy(value)

    def _copy(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)
