"""The cache of prepared data: locks between processes that share it, and its errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from zerofit.data.hashing import text_digest
from zerofit.data.text_sources import Source
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root, sync_folder, write_text

T = TypeVar("T")


@contextmanager
def cache_errors(name: str) -> Iterator[None]:
    """Turn an OSError into a UserError "cache" about the data `name`."""
    try:
        yield
    except OSError as error:
        message = f"{name}: {error.strerror or error}: {error.filename or cache_root()}"
        hint = f"check permissions and free space; ZEROFIT_CACHE=FOLDER sets another cache than {cache_root()}"
        raise UserError(Problem(kind="cache", message=message, hint=hint)) from error


@contextmanager
def waiting_lock(path: Path, text: str, progress: Reporter) -> Iterator[None]:
    """Hold a lock on the file `path`; show `text` while another process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)  # the operating system releases it when a process dies
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with progress.task(f"waiting: {text}", None, ""):
            lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


#     tokens/index/FINGERPRINT   the key, by names, sizes and times of the source's files: no file is read
#     tokens/KEY/                the files made from content with this hash
#     tokens/KEY.build/          their staging folder, renamed when it is complete
#     tokens/KEY.lock            locked by the process that makes them
#
# A copied or touched source gets a new fingerprint, but the same key: the source is hashed again, but not tokenized
# again.
@dataclass(frozen=True, kw_only=True)
class Preparation(Generic[T]):
    """How to make files from a source of data, and how to read these files."""

    source: Source
    identity: tuple[str, ...]  # everything except the source's content that determines the files
    write: Callable[[Path, int], None]  # writes into a folder, given the number of documents
    read: Callable[[Path], T | None]  # None: missing or incomplete

    def open(self, progress: Reporter) -> T:
        """Return the content of the files, which are made if they do not exist.

        If another process is making them, wait for it. Raises UserError for bad documents, "empty-data", "data-changed"
        or "cache" (no space, no permission).
        """
        root = cache_root() / "tokens"
        with cache_errors(self.source.name):
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root)
            index = root / "index" / text_digest(self.source.fingerprint(), *self.identity)
            key = index.read_text() if index.is_file() else ""
            if key and (files := self.read(root / key)):
                return files
            return self._find_or_build(progress, index)

    def _find_or_build(self, progress: Reporter, index: Path) -> T:
        """Find the files by the hash of the content, or make them, and write their key to `index`."""
        root, source, before = index.parent.parent, self.source, self.source.fingerprint()
        survey = source.survey(progress)
        key = text_digest(survey.digest, *self.identity)
        with waiting_lock(root / f"{key}.lock", f"another process tokenizes {source.name}", progress):
            files = self.read(root / key)
            if files is None:
                self._build(root, key, survey.documents)
                files = self.read(root / key)
                assert files is not None, "a cache that was just built cannot be read"
        if source.fingerprint() != before:  # the files may have content that the key does not cover
            shutil.rmtree(root / key, ignore_errors=True)
            message = f"{source.name} changed while it was tokenized"
            hint = "repeat the command when the data are complete"
            raise UserError(Problem(kind="data-changed", message=message, hint=hint))
        index.parent.mkdir(exist_ok=True)
        write_text(index, key)
        return files

    def _build(self, root: Path, key: str, documents: int) -> None:
        """Write the files into a staging folder, and rename it when they are complete."""
        staging = root / f"{key}.build"
        shutil.rmtree(staging, ignore_errors=True)
        # The lock of this key excludes other builders, so a staging folder that exists was left by a killed process.
        shutil.rmtree(root / key, ignore_errors=True)  # a folder of this name exists only if it could not be read
        staging.mkdir()
        try:
            self.write(staging, documents)
            os.replace(staging, root / key)
            sync_folder(root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove the staging folders of killed builds. No process has locked these folders."""
    from filelock import FileLock, Timeout

    for staging in root.glob("*.build"):
        try:
            with FileLock(root / f"{staging.stem}.lock", timeout=0):
                shutil.rmtree(staging, ignore_errors=True)
        except Timeout:
            continue  # another process is building it
