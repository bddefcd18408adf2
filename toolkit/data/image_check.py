"""Every image file is decoded once before training, and remembered: a broken one costs a message, not a night."""

from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerofit.data.files import write_aside
from zerofit.data.hashing import name_hash, text_digest
from zerofit.data.locks import waiting_lock
from zerofit.data.paths import cache_errors, cache_root
from zerofit.data.progress import Progress
from zerofit.spec.errors import Problem, UserError

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


def unreadable(root: Path, files: list[ImageFile], progress: Progress) -> dict[str, str]:
    """Names of the files that cannot be decoded, with the reason. Decodes only what was not seen before."""
    store = cache_root() / "images" / f"{text_digest(str(root))}.json"
    text = f"another process checks the images in {root}"
    with cache_errors(str(root)):
        store.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(store.with_suffix(".lock"), text, progress):
            bad = _checked(store, root, files, progress)
    return {f.name: bad[str(f.identity)] for f in files if str(f.identity) in bad}


def _checked(store: Path, root: Path, files: list[ImageFile], progress: Progress) -> dict[str, str]:
    """{identity: reason} of the broken files, from the memory in `store`, which learns what it did not know."""
    identities = np.array([file.identity for file in files], dtype=np.uint64)
    good, bad = _remembered(store)
    seen = np.isin(identities, good)
    fresh = [f for f, known in zip(files, seen, strict=True) if not known and str(f.identity) not in bad]
    if not fresh:
        return bad
    found = _decode_all(root, fresh, progress)
    bad = {str(f.identity): bad.get(str(f.identity)) or found.get(f.name, "") for f in files}
    bad = {identity: reason for identity, reason in bad.items() if reason}
    _remember(store, identities, bad)
    return bad


def refuse_or_skip(root: Path, bad: dict[str, str], skip: bool) -> None:
    """Raise UserError "bad-image" that names up to 20 of the unreadable files, unless they are to be skipped."""
    if not bad or skip:
        return
    named = [f"{root / name}: {reason}" for name, reason in sorted(bad.items())[:NAMED]]
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    message = f"{len(bad)} images in {root} cannot be decoded: {'; '.join(named)}{more}"
    hint = "--skip-bad leaves them out, counted in the report"
    raise UserError(Problem(kind="bad-image", message=message, hint=hint, where="--data"))


def _decode_all(root: Path, files: list[ImageFile], progress: Progress) -> dict[str, str]:
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


def _remember(store: Path, identities: np.ndarray, bad: dict[str, str]) -> None:
    good = identities[~np.isin(identities, np.array([int(i) for i in bad], dtype=np.uint64))]
    with write_aside(store.with_suffix(".npy")) as file:
        np.save(file, good)
    with write_aside(store) as file:
        file.write(json.dumps({"bad": bad}).encode())
