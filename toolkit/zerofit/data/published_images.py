"""The size and scaling of the images on which pretrained weights were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.data.base import Data, Dataset
from zerofit.data.image_sources import Scaling
from zerofit.data.mixing import ErasedImages
from zerofit.models.inputs import ImageInputs
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.foreign import read_json
from zerofit.spec.run import Run

PREPROCESSOR = "preprocessor_config.json"  # transformers' file
CARD = "zerofit.json"  # zerofit's own
CONFIG = "config.json"  # the model's, which may fix the image size
RESCALED = 1 / 255  # default factor for pixels
CLOSE = 1e-6  # tolerance for rounding


@dataclass(frozen=True, kw_only=True)
class PublishedImages:
    """The format of the weights' training images; None for unknown values."""

    size: int | None = None
    mean: tuple[float, ...] | None = None  # for pixels between 0 and 1
    std: tuple[float, ...] | None = None


# Weights work only with the image scaling of their training. It differs from ImageNet's for many models (ViT: 0.5,
# 0.5).
def published_images(run: Run) -> PublishedImages:
    """Read the image settings in the folder of the run's weights.

    Raises UserError for a file that does not parse.
    """
    folders = (Path(path).expanduser() for path in (run.pretrained, run.model) if path and Path(path).is_dir())
    if (folder := next(folders, None)) is None:
        return PublishedImages()
    folder = folder if (folder / CARD).is_file() or not (folder / "model" / CARD).is_file() else folder / "model"
    published = PublishedImages()
    for name, read in ((PREPROCESSOR, _of_transformers), (CARD, _of_ours), (CONFIG, _of_config)):
        file = folder / name
        if file.is_file():
            try:
                settings = read(read_json(file))
                # The model's own config comes last and decides the size: position embeddings fit only that size.
                size = settings.size if name == CONFIG and settings.size else published.size or settings.size
                known = published if published.mean else settings
                published = replace(known, size=size)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                message = f"cannot read the scaling of images in {file}: {type(error).__name__}: {error}"
                hint = "check that it is the file that came with the weights"
                raise UserError(Problem(kind="bad-value", message=message, hint=hint, where=str(file))) from None
    return published


def as_published(data: Data, published: PublishedImages) -> Data:
    """Return the data with its images scaled as in the training of the weights."""
    mean, std, inputs = published.mean, published.std, data.inputs
    if not isinstance(inputs, ImageInputs) or mean is None or std is None or len(mean) != inputs.channels:
        return data
    if inputs.mean is None:
        return data  # synthetic images have no pixel scaling
    old, new = (*inputs.mean, *(inputs.std or ())), (*mean, *std)
    if len(old) == len(new) and max(abs(a - b) for a, b in zip(old, new, strict=True)) < CLOSE:
        return data
    parts = {name: _scaled(getattr(data, name), mean, std) for name in ("train", "valid")}
    return replace(data, **parts, inputs=replace(inputs, mean=mean, std=std))


def _scaled(images: Dataset, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """Return the images with another scaling, given for pixels between 0 and 1."""
    if isinstance(images, ErasedImages):
        return replace(images, images=_scaled(images.images, mean, std))
    known: Any = images  # every source of images with mean and std has a scaling
    return replace(known, scaling=Scaling.of_units(mean, std, known.scaling.largest))


def _of_transformers(settings: Mapping[str, Any]) -> PublishedImages:
    """Return the settings in transformers' file of an image processor."""
    crop = settings.get("crop_size") if settings.get("do_center_crop", "crop_size" in settings) else None
    size = crop if crop is not None else settings.get("size")
    # transformers has several forms: a number, the height and width, or the shortest edge (image_processing_utils.py).
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    size = int(size) if size else None
    if not settings.get("do_normalize", True) or "image_mean" not in settings:
        return PublishedImages(size=size)
    # image_mean is of pixels times rescale_factor; here it is of pixels between 0 and 1
    rescaled = (settings.get("rescale_factor") or RESCALED) if settings.get("do_rescale", True) else 1.0
    factor = rescaled / RESCALED
    mean, std = (tuple(float(value) / factor for value in settings[name]) for name in ("image_mean", "image_std"))
    return PublishedImages(size=size, mean=mean, std=std)


def _of_config(settings: Mapping[str, object]) -> PublishedImages:
    size = settings.get("image_size")
    return PublishedImages(size=size if isinstance(size, int) else None)


def _of_ours(settings: Mapping[str, Any]) -> PublishedImages:
    inputs = settings["inputs"]
    figures = {name: tuple(map(float, inputs[name])) for name in ("mean", "std") if inputs.get(name)}
    return PublishedImages(size=inputs.get("size"), **figures)
