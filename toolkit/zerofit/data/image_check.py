"""Every image file is decoded once before training, and remembered: a broken one costs a message, not a night."""

from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerofit.data.hashing import name_hash, text_digest
from zerofit.data.locks import waiting_lock
from zerofit.data.paths import cache_errors, cache_root
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write, write_text

NAMED = 20  # files that an error lists


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """One file of an image folder."""

    name: str  # relative to the folder that the user named
    label: int
    stamp: tuple[int, int]  # size in bytes, time of change in ns

    @property
    def identity(self) -> int:
        """64 bits of name, size and time of change."""
        return name_hash(f"{self.name}\0{self.stamp[0]}\0{self.stamp[1]}")


def unreadable(root: Path, files: list[ImageFile], progress: Reporter) -> dict[str, str]:
    """Names of the files that cannot be decoded, with the reason. Decodes only what was not seen before."""
    store = cache_root() / "images" / f"{text_digest(str(root))}.json"
    text = f"another process checks the images in {root}"
    with cache_errors(str(root)):
        store.parent.mkdir(parents=True, exist_ok=True)
        bad, fresh = _compare(store, files)
        if fresh:
            with waiting_lock(store.with_suffix(".lock"), text, progress):
                bad, fresh = _compare(store, files)  # whoever held the lock may have checked them
                bad |= _decode_all(root, fresh, progress) if fresh else {}
                _remember(store, files, bad)
    return bad


def _compare(store: Path, files: list[ImageFile]) -> tuple[dict[str, str], list[ImageFile]]:
    """({name: reason} of files known to be broken, files of which nothing is known)."""
    good, broken = _remembered(store)
    known = np.isin(np.array([file.identity for file in files], dtype=np.uint64), good)
    bad = {file.name: broken[str(file.identity)] for file in files if str(file.identity) in broken}
    return bad, [f for f, is_good in zip(files, known, strict=True) if not is_good and f.name not in bad]


def refuse_or_skip(root: Path, bad: dict[str, str], skip: bool) -> None:
    """Raise UserError "bad-image" that names up to 20 of the unreadable files, unless they are to be skipped."""
    if not bad or skip:
        return
    named = [f"{root / name}: {reason}" for name, reason in sorted(bad.items())[:NAMED]]
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    message = f"{len(bad)} images in {root} cannot be decoded: {'; '.join(named)}{more}"
    hint = "--skip-bad leaves them out, counted in the report"
    raise UserError(Problem(kind="bad-image", message=message, hint=hint, where="--data"))


def _decode_all(root: Path, files: list[ImageFile], progress: Reporter) -> dict[str, str]:
    """Threads are enough: the decoders release the interpreter's lock."""
    bad = {}
    threads = len(os.sched_getaffinity(0))
    text = f"checking the images in {root}"
    with (
        progress.task(text, len(files), "images") as task,
        ThreadPoolExecutor(threads) as pool,
        warnings.catch_warnings(action="ignore"),
    ):
        for file, reason in zip(files, pool.map(lambda f: _why_unreadable(root / f.name), files), strict=True):
            if reason:
                bad[file.name] = reason
            task.advance(1)
    return bad


def _why_unreadable(path: Path) -> str:
    """The decoder's complaint, "" when the whole file decodes."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        return " ".join(str(error).replace(str(path), "the file").split())[:120] or type(error).__name__
    return ""


def _remembered(store: Path) -> tuple[np.ndarray, dict[str, str]]:
    """(identities of good files, {identity: reason} of bad ones); nothing where the memory is missing or broken."""
    try:
        bad = json.loads(store.read_text())["bad"]
        return np.load(store.with_suffix(".npy")), bad
    except (OSError, ValueError, KeyError, EOFError):
        return np.empty(0, np.uint64), {}


def _remember(store: Path, files: list[ImageFile], bad: dict[str, str]) -> None:
    good = np.array([file.identity for file in files if file.name not in bad], dtype=np.uint64)
    broken = {str(file.identity): bad[file.name] for file in files if file.name in bad}
    with atomic_write(store.with_suffix(".npy")) as file:
        np.save(file, good)
    write_text(store, json.dumps({"bad": broken}))
