"""Write DeepSpeed's checkpoint files, sync them to disk and hash them."""

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
SYNCING = 2  # threads that sync and hash files while the next one is written


# DeepSpeed calls save() for each of its files. Two things differ from its own engine:
#
#     sync and hash    in two threads, while torch.save writes the next file: reading a file back right after writing
#                      comes from the page cache, so the hash costs no disk time
#     background       save() copies tensors to host memory instead; another thread writes them while training goes on
class SyncedCheckpointEngine(CheckpointEngine):
    """Writes DeepSpeed's files, or keeps copies of their contents.

    It keeps copies between `begin_snapshot` and `take_snapshot`. A write failure is stored, and `marks` raises it. If
    `save` raised it, other ranks would wait for this rank, since they are in the middle of the same save.
    """

    def __init__(self, zero_stage: int) -> None:
        super().__init__()
        self._copied = zero_stage > 0  # model files contain only what is copied; at stage 0 also optimizer states
        self.name = "zerofit"
        self._copies = HostCopies()
        self._snapshot: list[tuple[object, Path]] | None = None
        self._pool = ThreadPoolExecutor(SYNCING, thread_name_prefix="sync")
        self._marks: dict[Path, Future[FileMark]] = {}
        self._failure: Exception | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing before a save."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True. The Saver makes the checkpoint visible once all ranks' files are complete."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return whether DeepSpeed must clone views before a save. Snapshots need no clones."""
        return self._snapshot is None

    def save(self, state_dict: object, path: str | Path) -> None:
        """Write a file like torch.save, or keep a copy of its contents."""
        if self._snapshot is not None:
            self._snapshot.append((self._copies.of(state_dict, Path(path).name), Path(path)))
        else:
            self._write(state_dict, Path(path))

    def write_text(self, text: str, path: Path) -> None:
        """Write a text file at once. A failure is stored, as in `save`."""
        try:
            path.write_text(text)
        except OSError as error:
            self._failure = self._failure or error

    def load(self, path: str | Path, map_location: object = None) -> Any:
        """Read a file without executing code in it. Raises UserError for a file that needs code."""
        # Tensors that DeepSpeed copies into its parameters stay on disk until the copy. Optimizers on a CPU use other
        # tensors as their states, so these must not stay mapped to the file.
        return safe_load.load(path, mmap=self._copied and str(path).endswith(MODEL_FILES), for_engine=True)

    def begin_snapshot(self) -> None:
        """Make `save` copy contents, which training may change, instead of writing them."""
        self._snapshot = []

    def take_snapshot(self) -> list[tuple[object, Path]]:
        """Return the copies made since `begin_snapshot`, for `write_snapshot` in another thread."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from the device may still be in progress
        snapshot, self._snapshot = self._snapshot or [], None
        return snapshot

    def write_snapshot(self, snapshot: list[tuple[object, Path]]) -> None:
        """Write the copies of a snapshot."""
        for state_dict, path in snapshot:
            self._write(state_dict, path)

    def marks(self) -> dict[Path, FileMark]:
        """Return sizes and hashes of the files written since the last call, once they are synced.

        Raises OSError for a failed write.
        """
        marks, self._marks = self._marks, {}
        failure, self._failure = self._failure, None
        finished = {path: mark.result() for path, mark in marks.items() if failure is None}
        if failure:
            raise OSError(str(failure)) from failure
        return finished

    def _write(self, state_dict: object, path: Path) -> None:
        if self._failure:
            return
        try:
            with _without_crc():
                torch.save(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            self._failure = error
            return
        self._marks[path] = self._pool.submit(_synced, path)


@contextmanager
def _without_crc() -> Iterator[None]:
    """Disable torch's CRC32, which takes as long as writing. The manifest has a stronger hash."""
    former = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(former)


def _synced(path: Path) -> FileMark:
    mark = mark_of(path)
    sync_file(path)
    return mark


class HostCopies:
    """Copies state dicts to host memory, so that training can go on while they are written."""

    def __init__(self) -> None:
        # kept for the next checkpoint, since the first access to new memory costs as much as the copy
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def of(self, value: object, file: str) -> object:
        """Return `value` with its tensors copied. A tensor that occurs twice is copied once.

        `file` identifies the structure: the next call for the same file uses the same buffers.
        """
        copies: dict[tuple[object, ...], Tensor] = {}  # by address, offset, shape and strides

        def copy(item: object) -> object:
            if isinstance(item, Tensor):
                # views of one storage are saved once by torch.save, so their copies must stay the same object
                key = (item.data_ptr(), item.storage_offset(), item.shape, item.stride())
                if key not in copies or not item.numel():
                    copies[key] = self._copy(item, (file, len(copies)))
                return copies[key]
            if isinstance(item, dict):
                copied = shallow(item)  # of the same class
                copied.update((key, copy(part)) for key, part in item.items())
                return copied
            if type(item) is list:
                return [copy(part) for part in item]
            if type(item) is tuple:
                return tuple(copy(part) for part in item)
            return item

        return copy(value)

    def _copy(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)
