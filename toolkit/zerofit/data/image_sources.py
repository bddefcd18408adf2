"""Image sets by name: scikit-learn's digits, torchvision's sets, and made-up images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from zerofit.data.base import Dataset
from zerofit.data.imagefolder import open_imagefolder
from zerofit.data.opened import OpenedImages
from zerofit.data.paths import data_root
from zerofit.data.pixels import PixelImages, Scaling
from zerofit.data.synthetic import SyntheticImages, parse_size
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.spec.task import Task


def open_digits(run: Run, argument: str, task: Task, progress: Reporter) -> OpenedImages:
    """scikit-learn's 1,797 hand-written digits, 1x8x8: a fixed fifth of each class is held out."""
    from sklearn.datasets import load_digits
    from sklearn.utils import Bunch

    bunch = load_digits()
    assert isinstance(bunch, Bunch)  # and not the arrays alone, as with return_X_y
    pixels = bunch.images.astype(np.uint8)[:, None]  # values 0..16
    labels = bunch.target.astype(np.int64)
    held_out = _stratified_fifth(labels)
    train = pixels[~held_out]
    scaling = Scaling(mean=(float(train.mean()),), std=(float(train.std()),))
    if task == "gan":
        scaling = Scaling.symmetric(1, 16)
    parts = [
        PixelImages(pixels=pixels[part], labels=labels[part], scaling=scaling, size=run.image_size or 8)
        for part in (~held_out, held_out)
    ]
    return OpenedImages(train=parts[0], valid=parts[1], channels=1, size=run.image_size or 8, classes=10)


def _stratified_fifth(labels: np.ndarray) -> np.ndarray:
    """A bool mask over the samples: 20 % of each class, the same on every machine."""
    mask = np.zeros(len(labels), dtype=bool)
    generator = np.random.Generator(np.random.Philox(key=8))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        mask[generator.permutation(members)[: round(len(members) / 5)]] = True
    return mask


@dataclass(frozen=True, kw_only=True)
class VisionSet:
    """What torchvision's sets differ in; mean and std over the training images, in units of 0..1."""

    class_name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int = 0
    mirror: bool = False
    mib: int = 0  # how much is downloaded


def open_vision_set(word: str, run: Run, argument: str, task: Task, progress: Reporter) -> OpenedImages:
    """One of torchvision's sets, from --data-root; fetched into it when --download is given.

    Raises UserError "data-missing" or "download".
    """
    facts = VISION_SETS[word]
    _fetch(word, facts, run, progress)
    size = run.image_size
    splits: list[Dataset] = []
    for train in (True, False):
        pixels, labels = _arrays(_load(word, facts, run, train))
        scaling = Scaling(mean=tuple(255 * m for m in facts.mean), std=tuple(255 * s for s in facts.std))
        if task == "gan":
            scaling = Scaling.symmetric(len(facts.mean), 255)
        augmented = {"shift": 0 if task == "gan" else facts.shift, "mirror": facts.mirror} if train else {}
        size = size or pixels.shape[-1]
        splits.append(PixelImages(pixels=pixels, labels=labels, scaling=scaling, size=size, **augmented))
    return OpenedImages(train=splits[0], valid=splits[1], channels=len(facts.mean), size=size, classes=10)


def _fetch(word: str, facts: VisionSet, run: Run, progress: Reporter) -> None:
    """Download where that is asked for and needed; one process of a machine does, the others wait."""
    if not run.download:
        return
    from filelock import FileLock

    root = data_root(run)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{word}.lock"), progress.task(f"{word}: fetching {facts.mib} MiB", None, ""):
            for train in (True, False):
                _class(facts)(root, train=train, download=True)
    except (OSError, RuntimeError) as error:
        message = f"{word} could not be fetched into {root}: {_one_line(error)}"
        hint = "fetch it on a machine with a network and name its folder with --data-root"
        raise UserError(Problem(kind="download", message=message, hint=hint, where="--download")) from error


def _load(word: str, facts: VisionSet, run: Run, train: bool):
    root = data_root(run)
    try:
        return _class(facts)(root, train=train, download=False)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        message = f"{word} is not (or not whole) in {root}: {_one_line(error)}"
        hint = f"--download fetches it ({facts.mib} MiB), or --data-root names the folder that holds it"
        raise UserError(Problem(kind="data-missing", message=message, hint=hint, where="--data-root")) from error


def _class(facts: VisionSet):
    from torchvision import datasets

    return getattr(datasets, facts.class_name)


def _arrays(dataset) -> tuple[np.ndarray, np.ndarray]:
    """torchvision keeps (n, height, width) tensors or (n, height, width, channels) arrays."""
    pixels = np.asarray(dataset.data)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(pixels), np.asarray(dataset.targets, dtype=np.int64)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def open_synthetic_images(run: Run, argument: str, task: Task, progress: Reporter) -> OpenedImages:
    """Made-up 3-channel images, 1,000 classes (`synthetic:N`: N), 224 pixels or --image-size. Learnable."""
    classes, size = parse_size(argument, default=1000, what="classes"), run.image_size or 224
    make = partial(SyntheticImages, classes=classes, size=size, seed=run.seed)
    return OpenedImages(
        train=make(n=50_000, first=0), valid=make(n=2_000, first=50_000), channels=3, size=size, classes=classes
    )


VISION_SETS: dict[str, VisionSet] = {
    "mnist": VisionSet(class_name="MNIST", mean=(0.1307,), std=(0.3081,), mib=12),
    "fashion-mnist": VisionSet(class_name="FashionMNIST", mean=(0.2860,), std=(0.3530,), mib=31),
    "cifar10": VisionSet(
        class_name="CIFAR10",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        shift=4,
        mirror=True,
        mib=170,
    ),
}

IMAGE_SOURCES: dict[str, Callable[[Run, str, Task, Reporter], OpenedImages]] = {
    "digits": open_digits,
    "mnist": partial(open_vision_set, "mnist"),
    "fashion-mnist": partial(open_vision_set, "fashion-mnist"),
    "cifar10": partial(open_vision_set, "cifar10"),
    "imagefolder": open_imagefolder,
    "synthetic": open_synthetic_images,
}
