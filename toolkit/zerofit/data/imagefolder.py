"""Folders of image files, one per class; each file is checked before training."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zerofit.data.base import NAMED, Data, Integers, LabelledDataset, data_error
from zerofit.data.cache import cache_errors, waiting_lock
from zerofit.data.hashing import held_out_limit, name_hash, text_digest
from zerofit.data.image_sources import Scaling
from zerofit.models.inputs import ImageInputs
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write, cache_root, write_text
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run
from zerofit.spec.units import counted

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import nn


IMAGENET = Scaling(mean=(255 * 0.485, 255 * 0.456, 255 * 0.406), std=(255 * 0.229, 255 * 0.224, 255 * 0.225))
T = TypeVar("T")
R = TypeVar("R")

TRAIN_NAMES = ("train", "training")  # in any case, as are the others
VALID_NAMES = ("val", "valid", "validation", "dev", "test", "testing")
VALID_SHARE = 0.10
FORMAT = "images-2"  # increase it if the set of readable files changes
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif"}
)
# folders created by systems and programs, skipped like folders that start with a dot
_SYSTEM = frozenset({"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"})
_LARGEST = 65535  # of pixels with 16 bits


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """One file of an image folder."""

    name: str  # relative to the user's folder
    label: int
    stamp: tuple[int, int]  # size in bytes, modification time in ns

    @property
    def identity(self) -> int:
        """64-bit hash of name, size and modification time."""
        return name_hash(f"{self.name}\0{self.stamp[0]}\0{self.stamp[1]}")


def open_imagefolder(name: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open PATH/CLASS/*.jpg, or PATH/train/CLASS/* with PATH/val (or valid, validation, test).

    Without a validation folder, 10 % of the files are held out, chosen by the hash of their relative names. Each file
    is decoded once to check it (cached by name, size and time). For a GAN, values are in -1..1. Raises UserError
    "data-missing", "no-classes", "data-classes", "unknown-class", "bad-image" or "empty-data".
    """
    root = Path(name.removeprefix("imagefolder:")).expanduser().absolute()
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        message = f"--data imagefolder: {root} {what}"
        hint = "use imagefolder:PATH with PATH/CLASS/*.jpg or PATH/train/CLASS/*.jpg"
        raise data_error("data-missing", message, hint)
    # Files are decoded once before training. A broken image is then an error at the start, not in the middle of an
    # epoch.
    folders = split_folders(root)
    classes = _class_names(folders[0])
    others = Counter[str]()
    files = [_image_files(root, folder, classes, others) for folder in folders]
    if len(classes) == 1 and files[0] and task != "gan":
        raise _one_class(folders[0] / classes[0])
    bad = _unreadable(root, [file for part in files for file in part], progress)
    if bad and not run.skip_bad:
        raise bad_images(f"cannot decode {counted(len(bad), 'image')} in {root}", root, bad)
    files = [[file for file in part if file.name not in bad] for part in files]
    train, valid = files if len(files) == 2 else split_by_name(files[0], lambda file: file.name)
    for part, images_of_part in (("training", train), ("validation", valid)):
        if not images_of_part:
            message = f"{root} has no readable {part} images ({', '.join(sorted(SUFFIXES))})"
            raise data_error("empty-data", message, "use imagefolder:PATH with at least two images under PATH/CLASS/")
    size = run.image_size or 224
    images = FolderImages(root=root, files=(), labels=np.empty(0, np.int64), size=size, style="valid")
    if task == "gan":
        images = replace(images, scaling=Scaling.symmetric(3, 255))
    return Data(
        name=name,
        train=images.of(train, "gan" if task == "gan" else "train"),
        valid=images.of(valid, "valid"),
        inputs=ImageInputs(channels=3, size=size, classes=len(classes), **images.scaling.units()),
        notes=tuple(_notes(classes, train, bad, others)),
    )


@dataclass(frozen=True, kw_only=True)
class FolderImages(LabelledDataset):
    """Image files, decoded, cropped and resized when a batch needs them."""

    root: Path
    files: tuple[str, ...]  # relative to root
    labels: np.ndarray  # int64 (n,)
    size: int
    style: str  # "train", "valid" or "gan"
    scaling: Scaling = IMAGENET
    decodes = True

    def __len__(self) -> int:
        return len(self.files)

    def of(self, files: list[ImageFile], style: str) -> FolderImages:
        """Return a copy with these files and this style."""
        labels = np.array([file.label for file in files], dtype=np.int64)
        return replace(self, files=tuple(file.name for file in files), labels=labels, style=style)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch. Raises OSError with the path of a file that has become unreadable."""
        import torch
        from torchvision.transforms import v2

        steps = {
            "train": [v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip()],
            "valid": [v2.Resize(round(self.size * 256 / 224)), v2.CenterCrop(self.size)],  # as usual for ImageNet
            "gan": [v2.Resize(self.size), v2.CenterCrop(self.size), v2.RandomHorizontalFlip()],
        }
        transform = v2.Compose([*steps[self.style], v2.PILToTensor()])
        # torchvision draws from torch's generator, whose other users (dropout) must not depend on the loading
        with torch.random.fork_rng(devices=[]):
            pixels = torch.stack([self._pixels(i, key, transform) for i, key in zip(indices, keys, strict=True)])
        mean, std = self.scaling.tensors()
        labels = torch.from_numpy(self.labels[np.asarray(indices)])
        return {"inputs": pixels.float().sub_(mean).div_(std), "labels": labels}

    def _pixels(self, index: int, key: int, transform: nn.Module) -> torch.Tensor:
        """Return an image, uint8 (3, size, size), whose randomness `key` determines."""
        import torch
        from PIL import Image

        path = self.root / self.files[index]
        # torch.manual_seed would also reseed the accelerator's generator (dropout).
        torch.default_generator.manual_seed(int(key))
        try:
            with Image.open(path) as image:
                return transform(as_rgb(image, upright=True))
        except Exception as error:
            raise OSError(f"{path} was readable when the run started but no longer is: {error}") from error


def _class_names(folder: Path) -> list[str]:
    """Return the names of the class folders, in the order of the labels. Raises UserError."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and is_own(entry.name))
    if not names:
        message = f"{folder} has no folders; each class needs a folder of image files"
        hint = f"move the images into {folder}/CLASS/, one folder per class (a GAN needs only one)"
        raise data_error("no-classes", message, hint)
    return names


def _one_class(folder: Path) -> UserError:
    """Return the error for a data set whose only class is this folder."""
    message = f"{folder.parent} has 1 class ({folder.name}), so there is nothing to learn"
    inner = [entry.name for entry in os.scandir(folder) if entry.is_dir() and is_own(entry.name)]
    hint = "use one folder per class, PATH/CLASS/*.jpg"
    if len(inner) > 1:  # an archive's own folder
        hint = f"if its folders are the classes, use imagefolder:{folder}"
    return data_error("data-classes", message, hint)


def _image_files(root: Path, folder: Path, classes: list[str], others: Counter[str]) -> list[ImageFile]:
    """Return all image files, sorted by class and name, and count other files. Raises UserError."""
    unknown = sorted(set(_class_names(folder)) - set(classes))
    if unknown:
        message = f"{folder} has classes that the training images lack: {', '.join(unknown[:20])}"
        raise data_error("unknown-class", message, "remove these folders, or add training images for them")
    # sorted below, since folders are listed in any order, and all ranks need the same
    files = [
        ImageFile(name=str(Path(path).relative_to(root)), label=label, stamp=(stat.st_size, stat.st_mtime_ns))
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path, stat in image_paths(folder / name, others)
    ]
    # Folders with files but no images are no classes, but annotations (COCO) or labels (YOLO).
    present = {file.label for file in files}
    without = [name for label, name in enumerate(classes) if label not in present]
    wrong = [name for name in without if any(in_folder for _, _, in_folder in os.walk(folder / name))]
    # A class of the training folder may lack validation images, so an empty folder is no error.
    if wrong:
        message = f"{folder} has folders without images: {', '.join(wrong[:NAMED])}; each would become a class"
        hint = "use one folder per class, PATH/CLASS/*.jpg; move all other files out of PATH"
        raise data_error("no-classes", message, hint)
    return sorted(files, key=lambda file: (file.label, file.name))


def _notes(classes: list[str], train: list[ImageFile], bad: dict[str, str], others: Counter[str]) -> Iterator[str]:
    """Yield what the user should know of the classes, of bad files and of files without an image's suffix."""
    shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    yield f"{len(classes)} {'classes' if len(classes) > 1 else 'class'}: {shown}"
    present = {file.label for file in train}
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty:
        yield f"{len(empty)} of {len(classes)} classes have no training image: {', '.join(empty[:10])}"
    if bad:
        yield f"{counted(len(bad), 'broken image')} skipped"
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))
        yield f"{counted(others.total(), 'file')} skipped, whose suffix is not an image's: {kinds}"


# Decoding all images takes as long as an epoch, so the result is cached by name, size and time of each file. Without
# the check, a broken image would end a run hours later.
def _unreadable(root: Path, files: list[ImageFile], progress: Reporter) -> dict[str, str]:
    """Return the files that cannot be decoded, with reasons, and cache which files can."""
    store = cache_root() / "images" / f"{text_digest(str(root), FORMAT)}.json"
    text = f"another process checks the images in {root}"
    with cache_errors(str(root)):
        store.parent.mkdir(parents=True, exist_ok=True)
        bad, fresh = _compare(store, files)
        if fresh:
            with waiting_lock(store.with_suffix(".lock"), text, progress):
                bad, fresh = _compare(store, files)  # another process may have checked the files meanwhile
                checking, paths = f"checking the images in {root}", [root / file.name for file in fresh]
                reasons = decode_all(checking, paths, _why_unreadable, progress) if fresh else []
                bad |= {file.name: reason for file, reason in zip(fresh, reasons, strict=True) if reason}
                _remember(store, files, bad)
    return bad


def _compare(store: Path, files: list[ImageFile]) -> tuple[dict[str, str], list[ImageFile]]:
    """Return {name: reason} of known broken files, and the files that were not checked yet."""
    try:
        broken = json.loads(store.read_text())["bad"]  # {identity: reason}
        good = np.load(store.with_suffix(".npy"))  # identities: for a million files, an array is smaller than JSON
    except (OSError, ValueError, KeyError, EOFError):  # the store is missing or damaged
        broken, good = {}, np.empty(0, np.uint64)
    known = np.isin(np.array([file.identity for file in files], dtype=np.uint64), good)
    bad = {file.name: broken[str(file.identity)] for file in files if str(file.identity) in broken}
    return bad, [f for f, is_good in zip(files, known, strict=True) if not is_good and f.name not in bad]


def _why_unreadable(path: Path) -> str:
    """Return the decoder's error; "" if the file decodes completely."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            as_rgb(image, upright=True)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        return short_reason(error, path)
    return ""


def _remember(store: Path, files: list[ImageFile], bad: dict[str, str]) -> None:
    """Write which files can be decoded, for `_compare`."""
    good = np.array([file.identity for file in files if file.name not in bad], dtype=np.uint64)
    broken = {str(file.identity): bad[file.name] for file in files if file.name in bad}
    with atomic_write(store.with_suffix(".npy")) as file:
        np.save(file, good)
    write_text(store, json.dumps({"bad": broken}))


def is_own(name: str) -> bool:
    """Return whether a file or folder is the user's, not a system's or program's."""
    return not name.startswith(".") and name.lower() not in _SYSTEM


def image_paths(folder: Path, others: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths and stat results of all image files under a folder, and count other files by suffix."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_own(entry.name):
                continue
            if entry.is_dir():
                inner = Path(entry.path)
                # A link to a folder is followed, unless it leads to a folder that contains it.
                if not (entry.is_symlink() and folder.resolve().is_relative_to(inner.resolve())):  # a loop
                    yield from image_paths(inner, others)
            elif (suffix := os.path.splitext(entry.name)[1].lower()) in SUFFIXES:
                yield entry.path, entry.stat()
            else:
                others[suffix or entry.name] += 1


def split_folders(root: Path) -> list[Path]:
    """Return the training folder and, if it exists, the validation folder."""
    folders = {path.name.lower(): path for path in root.glob("*/")}
    train, valid = ([folders[name] for name in names if name in folders][:1] for names in (TRAIN_NAMES, VALID_NAMES))
    return [*train, *valid] if train else [root]


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
        # threads, since decoders release the interpreter's lock; the process may use fewer cores than the machine has
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        warnings.catch_warnings(action="ignore"),
    ):
        for result in pool.map(decode, files):
            results.append(result)
            task.advance(1)
    return results


def bad_images(what: str, root: Path, bad: dict[str, str]) -> UserError:
    """Return an error that names the first bad files, with reasons, after the words `what`."""
    named = [f"{root / name}: {reason}" for name, reason in sorted(bad.items())[:NAMED]]
    unnamed = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    message = f"{what}: {'; '.join(named)}{unnamed}"
    return data_error("bad-image", message, "--skip-bad skips and counts them")


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
