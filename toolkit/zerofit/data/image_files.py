"""Image files: find them, and decode their pixels as image viewers do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
# folders created by systems and programs, skipped like those that start with a dot
_SYSTEM = frozenset({"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"})
_LARGEST = 65535  # of 16-bit values


def is_own(name: str) -> bool:
    """Return whether a file or folder belongs to the user, not to a system."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


def image_paths(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths and stat results of all image files under a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_own(entry.name):
                continue
            if entry.is_dir():
                within = Path(entry.path)
                if not (entry.is_symlink() and folder.resolve().is_relative_to(within.resolve())):  # a loop
                    yield from image_paths(within)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                yield entry.path, entry.stat()


def as_rgb(image: Image.Image, upright: bool = False) -> Image.Image:
    """Return an opened image with 8 bits per colour. 16 bits become their upper 8, as Pillow does with 16-bit colours.

    `upright`: rotate by the EXIF tag, as image viewers do. Raises ValueError for numbers without a known white level,
    which Pillow itself would cut off at 255.
    """
    import numpy as np
    from PIL import Image, ImageOps

    seen = image
    if upright:
        with suppress(Exception):  # ignore a broken tag
            seen = ImageOps.exif_transpose(image)
    if not image.mode.startswith(("I", "F")):
        return seen.convert("RGB")
    values = np.asarray(seen)
    wide = image.mode == "I" and image.format != "PNG"  # PNG has 16 bits at most
    if image.mode == "F" or wide or (values.size and not 0 <= values.min() <= values.max() <= _LARGEST):
        raise ValueError(f"its pixels (mode {image.mode}) have no known white level; save it with 8 or 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
