"""Image files: find them, and decode their pixels as image viewers do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zerofit.data.hashing import held_out_limit, name_hash
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")
R = TypeVar("R")

VALID_NAMES = ("val", "valid", "validation", "test")
VALID_SHARE = 0.10
FORMAT = "images-2"  # increase it if the set of readable files changes
NAMED = 20  # maximum number of files named in an error
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
# folders created by systems and programs, skipped like folders that start with a dot
_SYSTEM = frozenset({"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"})
_LARGEST = 65535  # of pixels with 16 bits


def is_own(name: str) -> bool:
    """Return whether a file or folder is the user's, not a system's or program's."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


def image_paths(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths and stat results of all image files under a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_own(entry.name):
                continue
            if entry.is_dir():
                inner = Path(entry.path)
                # A link to a folder is followed, unless it leads to a folder that contains it.
                if not (entry.is_symlink() and folder.resolve().is_relative_to(inner.resolve())):  # a loop
                    yield from image_paths(inner)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                yield entry.path, entry.stat()


def split_folders(root: Path) -> list[Path]:
    """Return the training folder and, if it exists, the validation folder."""
    if not (root / "train").is_dir():
        return [root]
    return [root / "train", *[root / name for name in VALID_NAMES if (root / name).is_dir()][:1]]


def split_by_name(files: Sequence[T], name: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Return training and validation files; name hashes hold out 10 %, at least one."""
    if not files:
        return [], []
    hashes = np.array([name_hash(name(file)) for file in files], dtype=np.uint64)
    held_out = hashes <= np.uint64(held_out_limit(hashes, VALID_SHARE))
    pairs = list(zip(files, held_out, strict=True))
    return [file for file, held in pairs if not held], [file for file, held in pairs if held]


def decode_all(text: str, files: Sequence[T], decode: Callable[[T], R], progress: Reporter) -> list[R]:
    """Return the result of `decode` for each file, in order. `text` is shown with the progress."""
    results = []
    with (
        progress.task(text, len(files), "images") as task,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,  # decoders release the interpreter's lock
        warnings.catch_warnings(action="ignore"),
    ):
        for result in pool.map(decode, files):
            results.append(result)
            task.advance(1)
    return results


def bad_images(what: str, root: Path, bad: dict[str, str]) -> Problem:
    """Return a problem that names the first bad files, with reasons, after the words `what`."""
    named = [f"{root / name}: {reason}" for name, reason in sorted(bad.items())[:NAMED]]
    unnamed = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    message = f"{what}: {'; '.join(named)}{unnamed}"
    return Problem(kind="bad-image", message=message, hint="--skip-bad skips and counts them", where="--data")


def short_reason(error: Exception, path: Path | None = None) -> str:
    """Return a decoder's error on one line, without the path."""
    text = str(error) if path is None else str(error).replace(str(path), "the file")
    return " ".join(text.split())[:120] or type(error).__name__


def as_rgb(image: Image.Image, upright: bool = False) -> Image.Image:
    """Return an image with 8 bits per color: of 16 bits the upper 8, as in Pillow.

    `upright`: rotate by the EXIF tag, as image viewers do. Raises ValueError for pixel values without a known white
    level.
    """
    from PIL import Image, ImageOps

    rotated = image
    if upright:
        with suppress(Exception):  # ignore a broken tag
            rotated = ImageOps.exif_transpose(image)
    if not image.mode.startswith(("I", "F")):
        return rotated.convert("RGB")
    # Pillow's own conversion would clip the values at 255.
    values = np.asarray(rotated)
    wide = image.mode == "I" and image.format != "PNG"  # PNG has 16 bits at most
    if image.mode == "F" or wide or (values.size and not 0 <= values.min() <= values.max() <= _LARGEST):
        raise ValueError(f"the largest pixel value of mode {image.mode} is unknown; save the image with 8 or 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
