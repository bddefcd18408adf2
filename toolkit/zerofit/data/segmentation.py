"""Images with masks: PATH/images/NAME.jpg and PATH/masks/NAME.png with classes as values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zerofit.data.base import NAMED, Data, Integers, LabelledDataset, data_error
from zerofit.data.cache import cache_errors, waiting_lock
from zerofit.data.hashing import text_digest
from zerofit.data.image_sources import Scaling
from zerofit.data.imagefolder import (
    FORMAT,
    IMAGENET,
    SUFFIXES,
    as_rgb,
    bad_images,
    decode_all,
    is_own,
    short_reason,
    split_by_name,
    split_folders,
)
from zerofit.models.inputs import SegmentationInputs
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root, write_text
from zerofit.spec.model_facts import IGNORE_INDEX, Task
from zerofit.spec.run import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

UNLABELLED = 255  # mask value of pixels without a class
# minimum share of an image in a random crop; torchvision's 0.08 is meant for images of one class
SMALLEST = 0.25
USUAL_SIZE = 256
HINT = "use segmentation:PATH with PATH/images/NAME.jpg and PATH/masks/NAME.png, or these in PATH/train and PATH/val"


def mask_of(image: Path) -> Path:
    """Return the mask file of an image file."""
    return image.parent.with_name("masks") / f"{image.stem}.png"


@dataclass(frozen=True, kw_only=True)
class SegmentedImages(LabelledDataset):
    """Images and masks, decoded, cropped, resized and mirrored together when a batch needs them."""

    root: Path
    files: tuple[str, ...]  # images, relative to root
    size: int
    train: bool
    scaling: Scaling = IMAGENET
    decodes = True

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; labels are int64 (batch, size, size), -100 for pixels without a class."""
        import torch
        from torchvision.transforms import v2

        transform: nn.Module = v2.Resize((self.size, self.size))
        if self.train:
            crop = v2.RandomResizedCrop(self.size, scale=(SMALLEST, 1.0))
            transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
        with torch.random.fork_rng(devices=[]):
            drawn = zip(indices, keys, strict=True)
            samples = [_pair(self.root / self.files[i], int(key), transform) for i, key in drawn]
        mean, std = self.scaling.tensors()
        labels = torch.stack([mask for _, mask in samples]).long()
        images = torch.stack([image for image, _ in samples]).float().sub_(mean).div_(std)
        return {"inputs": images, "labels": labels.masked_fill_(labels == UNLABELLED, IGNORE_INDEX)}


def _pair(file: Path, key: int, transform: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image, uint8 (3, size, size), and its mask, uint8 (size, size)."""
    import torch
    from PIL import Image
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import pil_to_tensor

    torch.default_generator.manual_seed(key)  # not the accelerator's
    with Image.open(file) as image, Image.open(mask_of(file)) as mask:
        # torchvision transforms tensors of these types together: it mirrors both, and does not blend classes.
        pixels = tv_tensors.Image(pil_to_tensor(as_rgb(image)))
        classes = tv_tensors.Mask(torch.from_numpy(np.array(mask, dtype=np.uint8)))
    image, mask = transform(pixels, classes)
    return image.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor)


def open_segmentation(name: str, run: Run, task: Task, progress: Reporter) -> Data:
    """Open images and masks; without a validation folder, name hashes hold out 10 %.

    Classes are 0 to the largest value of any mask except 255. All files are decoded once, with the result cached.
    Raises UserError "data-missing", "empty-data", "bad-image" or "data-classes".
    """
    root = Path(name.removeprefix("segmentation:")).expanduser().absolute()
    parts = [_images(root, folder) for folder in split_folders(root)]
    values, bad = _checked(root, [file for part in parts for file in part], progress)
    if bad and not run.skip_bad:
        raise bad_images(f"{len(bad)} bad images or masks", root, bad)
    good = [[file for file in part if file not in bad] for part in parts]
    train, valid = good if len(good) == 2 else split_by_name(good[0], str)
    for what, part in (("training", train), ("validation", valid)):
        if not part:
            message = f"{root} has no readable {what} images with masks"
            raise data_error("empty-data", message, HINT)
    classes = max(values, default=0) + 1
    if classes < 2:
        message = f"the masks in {root} have only one class, so there is nothing to learn"
        raise data_error("data-classes", message, "mask values are classes from 0; 255 means no class")
    notes = [f"{len(bad)} broken images or masks skipped"] if bad else []
    if len(values) < classes:
        found = f"the masks have {len(values)} different values from 0 to {classes - 1}"
        hint = "if some of these classes do not exist, renumber the others from 0 without gaps"
        notes.append(f"{found}, so the model has {classes} classes; {hint}")
    size = run.image_size or USUAL_SIZE
    images = SegmentedImages(root=root, files=tuple(train), size=size, train=True)
    return Data(
        name=name,
        train=images,
        valid=replace(images, files=tuple(valid), train=False),
        inputs=SegmentationInputs(channels=3, size=size, classes=classes, **IMAGENET.units()),
        notes=tuple(notes),
    )


def _images(root: Path, folder: Path) -> list[str]:
    """Return a folder's images, sorted, relative to `root`. Raises UserError if a mask is missing."""
    images, masks = folder / "images", folder / "masks"
    for folder_of_files in (images, masks):
        if not folder_of_files.is_dir():
            message = f"--data segmentation: {folder_of_files} is not a folder"
            raise data_error("data-missing", message, HINT)
    files = sorted(f for f in images.iterdir() if f.suffix.lower() in SUFFIXES and is_own(f.name))
    missing = [file.name for file in files if not mask_of(file).is_file()]
    if missing:
        message = f"{len(missing)} images in {images} have no mask: {', '.join(missing[:NAMED])}"
        raise data_error("data-missing", message, HINT)
    return [str(file.relative_to(root)) for file in files]


# The number of classes is known only after reading all masks, so they are read once before training.
def _checked(root: Path, files: list[str], progress: Reporter) -> tuple[list[int], dict[str, str]]:
    """Return the classes that occur, and bad images with reasons, and cache them."""
    # Unlike for image folders, one result covers all files: the number of classes depends on every mask.
    stats = [file.stat() for name in files for file in (root / name, mask_of(root / name))]
    stamps = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats]
    digest = text_digest(str(root), FORMAT, *files, *stamps)
    store = cache_root() / "masks" / f"{digest}.json"
    with cache_errors(str(root)):
        store.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(store.with_suffix(".lock"), f"another process checks the masks in {root}", progress):
            try:
                known = json.loads(store.read_text())
                return known["values"], known["bad"]
            except (OSError, ValueError, KeyError):
                checking = f"checking the masks in {root}"
                checks = decode_all(checking, files, lambda name: _check_pair(root / name), progress)
                bad = {name: reason for name, (_, reason) in zip(files, checks, strict=True) if reason}
                values = sorted(set[int]().union(*(found for found, _ in checks)))
                write_text(store, json.dumps({"values": values, "bad": bad}))
                return values, bad


def _check_pair(file: Path) -> tuple[list[int], str]:
    """Return the classes in the mask, none for a bad pair, and what is wrong, "" if nothing."""
    from PIL import Image

    try:
        with Image.open(file) as image, Image.open(mask_of(file)) as mask:
            as_rgb(image)
            if mask.tile and str(mask.tile[0][3]).startswith("L;"):  # Pillow scales the values to 0 to 255
                return [], "the mask has gray values of 2 or 4 bits; save it with 8 bits"
            if mask.mode not in ("1", "L", "P"):
                return [], f"the mask has mode {mask.mode}, but needs one number below 256 per pixel"
            if mask.size != image.size:
                return [], f"its mask has {mask.size[0]}x{mask.size[1]} pixels, not {image.size[0]}x{image.size[1]}"
            values = np.array(mask, dtype=np.uint8)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        return [], short_reason(error)
    return np.unique(values[values != UNLABELLED]).tolist(), ""
