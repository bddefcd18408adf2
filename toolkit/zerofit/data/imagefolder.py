"""Folders of image files, one folder a class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zerofit.data.base import Dataset, Integers
from zerofit.data.hashing import held_out_limit, name_hash
from zerofit.data.image_check import ImageFile, refuse_or_skip, unreadable
from zerofit.data.opened import OpenedImages
from zerofit.data.pixels import Scaling
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.task import Task

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
VALID_NAMES = ("val", "valid", "validation", "test")
VALID_SHARE = 0.10
IMAGENET = Scaling(mean=(255 * 0.485, 255 * 0.456, 255 * 0.406), std=(255 * 0.229, 255 * 0.224, 255 * 0.225))


def open_imagefolder(run: Run, argument: str, task: Task, progress: Reporter) -> OpenedImages:
    """PATH/CLASS/*.jpg, or PATH/train/CLASS/* with PATH/val (valid, validation, test) beside it.

    Without such a folder a tenth of the files, by the hash of their relative names, is held out. Each file is decoded
    once to see that it can be (remembered by name, size and time). Training: RandomResizedCrop and flip; validation:
    Resize and CenterCrop; a GAN gets no random crops, and values in -1..1.
    Raises UserError "data-missing", "no-classes", "unknown-class", "bad-image" or "empty-data".
    """
    root = Path(argument).expanduser().absolute()
    folders = _split_folders(root)
    classes = _class_names(folders[0])
    files = [_image_files(root, folder, classes) for folder in folders]
    bad = unreadable(root, [file for part in files for file in part], progress)
    refuse_or_skip(root, bad, run.skip_bad)
    files = [[file for file in part if file.name not in bad] for part in files]
    train, valid = files if len(files) == 2 else _held_out(files[0])
    _refuse_empty(root, train, valid)
    size = run.image_size or 224
    make = FolderImages(root=root, files=(), labels=np.empty(0, np.int64), size=size, style="valid")
    if task == "gan":
        make = replace(make, scaling=Scaling.symmetric(3, 255))
    return OpenedImages(
        train=_with_files(make, train, classes, "gan" if task == "gan" else "train"),
        valid=_with_files(make, valid, classes, "valid"),
        channels=3,
        size=size,
        classes=len(classes),
        bad=tuple(sorted(bad)),
        notes=tuple(_notes(classes, train, bad)),
    )


@dataclass(frozen=True, kw_only=True)
class FolderImages(Dataset):
    """Image files that are decoded, cut and resized when a batch asks for them."""

    root: Path
    files: tuple[str, ...]  # relative to root
    labels: np.ndarray  # int64 (n,)
    size: int
    style: str  # a key of _STYLES
    scaling: Scaling = IMAGENET
    decodes = True

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch. Raises OSError, with the path, for a file that has become unreadable."""
        import torch

        transform = _STYLES[self.style](self.size)
        with torch.random.fork_rng(devices=[]):
            pixels = torch.stack([self._pixels(i, key, transform) for i, key in zip(indices, keys, strict=True)])
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.scaling.mean, self.scaling.std))
        labels = torch.from_numpy(self.labels[np.asarray(indices)])
        return {"inputs": pixels.float().sub_(mean).div_(std), "labels": labels}

    def targets(self, indices: Integers) -> int:
        """One label an image."""
        return len(indices)

    def _pixels(self, index: int, key: int, transform):
        import torch
        from PIL import Image

        path = self.root / self.files[index]
        # Not torch.manual_seed, which would reseed the accelerator's generator (dropout) as well.
        torch.default_generator.manual_seed(int(key))
        try:
            with Image.open(path) as image:
                return transform(image.convert("RGB"))
        except Exception as error:
            raise OSError(f"{path} could be read when the run began and no longer can: {error}") from error


def _train_style(size: int):
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def _valid_style(size: int):
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])


def _gan_style(size: int):
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def _split_folders(root: Path) -> list[Path]:
    """[train, valid], or one folder that is to be divided."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        message = f"--data imagefolder: {root} {what}"
        hint = "imagefolder:PATH with PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
        raise UserError(Problem(kind="data-missing", message=message, hint=hint, where="--data"))
    if not (root / "train").is_dir():
        return [root]
    valid = [root / name for name in VALID_NAMES if (root / name).is_dir()]
    return [root / "train", *valid[:1]]


def _class_names(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        message = f"{folder} holds no folders; each class is a folder of image files"
        hint = f"move the images into {folder}/CLASS/, one folder a class (one is enough for a GAN)"
        raise UserError(Problem(kind="no-classes", message=message, hint=hint, where="--data"))
    return names


def _image_files(root: Path, folder: Path, classes: list[str]) -> list[ImageFile]:
    """All image files under the class folders, sorted by name. Raises UserError "unknown-class"."""
    unknown = sorted(set(_class_names(folder)) - set(classes))
    if unknown:
        message = f"{folder} has classes that the training images lack: {', '.join(unknown[:20])}"
        hint = "remove these folders, or add training images for them"
        raise UserError(Problem(kind="unknown-class", message=message, hint=hint, where="--data"))
    found = [
        ImageFile(name=str(Path(entry.path).relative_to(root)), label=label, stamp=_stamp(entry))
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for entry in _walk(folder / name)
    ]
    return sorted(found, key=lambda file: (file.label, file.name))


def _walk(folder: Path) -> Iterator[os.DirEntry]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path))
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.name.startswith("."):
                yield entry


def _stamp(entry: os.DirEntry) -> tuple[int, int]:
    facts = entry.stat()
    return facts.st_size, facts.st_mtime_ns


def _held_out(files: list[ImageFile]) -> tuple[list[ImageFile], list[ImageFile]]:
    if not files:
        return [], []
    hashes = np.array([name_hash(file.name) for file in files], dtype=np.uint64)
    held = hashes <= np.uint64(held_out_limit(hashes, VALID_SHARE))
    return [f for f, h in zip(files, held, strict=True) if not h], [f for f, h in zip(files, held, strict=True) if h]


def _refuse_empty(root: Path, train: list[ImageFile], valid: list[ImageFile]) -> None:
    for part, files in (("training", train), ("validation", valid)):
        if not files:
            message = f"{root} holds no readable {part} images ({', '.join(sorted(SUFFIXES))})"
            hint = "imagefolder:PATH with at least two images under PATH/CLASS/"
            raise UserError(Problem(kind="empty-data", message=message, hint=hint, where="--data"))


def _with_files(make: FolderImages, files: list[ImageFile], classes: list[str], style: str) -> FolderImages:
    labels = np.array([file.label for file in files], dtype=np.int64)
    return replace(make, files=tuple(file.name for file in files), labels=labels, style=style)


def _notes(classes: list[str], train: list[ImageFile], bad: dict[str, str]) -> Iterator[str]:
    present = {file.label for file in train}
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty:
        yield f"{len(empty)} of {len(classes)} classes have no training image: {', '.join(empty[:10])}"
    if bad:
        yield f"{len(bad)} broken images skipped"


_STYLES = {"train": _train_style, "valid": _valid_style, "gan": _gan_style}
