"""How DeepSpeed's checkpoint files reach the disk: the interface of its own checkpoint engines, with synced files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.store import FileMark, mark_of
from zerofit.spec.files import sync_file
from zerofit.train.snapshot import Snapshots

MODEL_FILES = "model_states.pt"
SYNCING = 2  # files being synced and hashed while the next one is written


class SyncedCheckpointEngine(CheckpointEngine):
    """Writes files at once, or (between `hold` and `release`) keeps copies of what is to be written.

    A failure to write is kept until `marks` instead of raised: the other ranks are in the midst of the same save, and
    would wait for this one.
    """

    def __init__(self, zero_stage: int) -> None:
        super().__init__()
        self._copied = zero_stage > 0  # what a file of the model's holds; at stage 0 the optimizer's states lie in it
        self.name = "zerofit"
        self._snapshots = Snapshots()
        self._held: list[tuple[Any, Path]] | None = None
        self._pool = ThreadPoolExecutor(SYNCING, thread_name_prefix="sync")
        self._marks: dict[Path, Future[FileMark]] = {}
        self._failure: Exception | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """DeepSpeed is about to save; nothing is needed."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """DeepSpeed has saved; the Saver makes the checkpoint visible later, once all ranks' files are whole."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed must clone views before it hands them on: copies are whole tensors in any case."""
        return self._held is None

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write what torch.save writes."""
        if self._held is not None:
            self._held.append((self._snapshots.of(state_dict, Path(path).name), Path(path)))
        else:
            self._write(state_dict, Path(path))

    def load(self, path: str | Path, map_location: Any = None) -> Any:
        """Read a file without running anything that lies in it. Raises UserError for one that asks for more.

        What DeepSpeed copies into its parameters is left on the disk until then; optimizers on a CPU would go on with
        the mapped file itself.
        """
        return safe_load.load(path, mmap=self._copied and str(path).endswith(MODEL_FILES), for_engine=True)

    def hold(self) -> None:
        """From now on take copies; what is trained on may change afterwards."""
        self._held = []

    def release(self) -> list[tuple[Any, Path]]:
        """What was held since `hold`, for `write_held` to write from another thread."""
        self._snapshots.finish()
        held, self._held = self._held or [], None
        return held

    def write_held(self, held: list[tuple[Any, Path]]) -> None:
        """Write what was held."""
        for state_dict, path in held:
            self._write(state_dict, path)

    def marks(self) -> dict[Path, FileMark]:
        """Sizes and hashes of all files since the last call, each on the disk by now. Raises OSError."""
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
    """torch would compute a CRC32 of each tensor, which takes as long as writing it; the manifest's hash says more."""
    former = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(former)


def _synced(path: Path) -> FileMark:
    """The hash is of what can be read back, the sync makes it stay."""
    mark = mark_of(path)
    sync_file(path)
    return mark
