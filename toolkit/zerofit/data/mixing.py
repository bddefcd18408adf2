"""What the images of a step share: the size that they have by now, and how they are mixed (MixUp, CutMix).

An image is mixed with the one before it in the global batch, the first with the last, as torchvision does with a batch.
A rank that has a part of the batch makes one sample more, so that the images do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zerofit.data.base import Dataset, Integers, LabelledDataset
from zerofit.data.hashing import sample_hashes
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.run import Run

if TYPE_CHECKING:
    import torch

_MIXED, _ERASED = 21, 22  # streams of randomness of a step, and of a sample


@dataclass(frozen=True, kw_only=True)
class MicroSlice:
    """The samples of one micro batch, and what of their step they share."""

    positions: range
    size: int | None = None  # pixels of a side; None: the data's
    before: int | None = None  # the position whose image the first one is mixed with; None: nothing is mixed
    key: int = 0  # of the step's randomness


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """MixUp or CutMix of whole batches by torchvision, with equal odds where both are asked for."""

    mixup: float | None
    cutmix: float | None
    classes: int

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image (batch, channels, size, size) and label (batch,) with the one before it.

        Labels become float32 (batch, classes). `key` fixes what is drawn, once for all of them.
        """
        import torch
        from torchvision.transforms import v2

        ways: list[Callable[..., Any]] = []
        if self.mixup is not None:
            ways.append(v2.MixUp(alpha=self.mixup, num_classes=self.classes))
        if self.cutmix is not None:
            ways.append(v2.CutMix(alpha=self.cutmix, num_classes=self.classes))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            return v2.RandomChoice(ways)(images, labels)


@dataclass(frozen=True, kw_only=True)
class StepImages:
    """What a run asks of the images of each step."""

    steps: int
    sizes: ImageSizes | None
    mixing: Mixing | None

    @classmethod
    def of(cls, run: Run, steps: int, inputs: Inputs | None) -> StepImages | None:
        """Return what this run asks for; None where it is nothing."""
        sizes = ImageSizes.parse(run.image_sizes) if run.image_sizes else None
        mixing = None
        if mixes(run) and isinstance(inputs, ImageInputs):
            mixing = Mixing(mixup=run.mixup, cutmix=run.cutmix, classes=inputs.classes)
        return cls(steps=steps, sizes=sizes, mixing=mixing) if sizes or mixing else None

    def slice(self, positions: range, step: int, batch: range, first_key: int) -> MicroSlice:
        """Return a micro batch of a step, whose global batch has the positions `batch`, the first with this key."""
        size = self.sizes.at(step, self.steps) if self.sizes else None
        if self.mixing is None:
            return MicroSlice(positions=positions, size=size)
        before = positions.start - 1 if positions.start > batch.start else batch.stop - 1
        key = int(sample_hashes([first_key], _MIXED)[0] >> np.uint64(1))
        return MicroSlice(positions=positions, size=size, before=before, key=key)


def mixes(run: Run) -> bool:
    """Return whether a run mixes images, so that labels are probabilities."""
    return run.mixup is not None or run.cutmix is not None


@dataclass(frozen=True, kw_only=True)
class ErasedImages(LabelledDataset):
    """Images of which a rectangle is erased now and then, after they are scaled, by torchvision's RandomErasing."""

    images: Dataset
    odds: float

    @property
    def decodes(self) -> bool:
        """Whether loader processes pay."""
        return self.images.decodes

    def __len__(self) -> int:
        return len(self.images)

    def sized(self, size: int) -> ErasedImages:
        """See Dataset.sized."""
        return ErasedImages(images=self.images.sized(size), odds=self.odds)

    def batch(self, indices: Integers, keys: Integers) -> dict[str, torch.Tensor]:
        """See Dataset.batch."""
        import torch
        from torchvision.transforms import v2

        batch, erase = self.images.batch(indices, keys), v2.RandomErasing(p=self.odds)
        seeds = (sample_hashes(keys, _ERASED) >> np.uint64(1)).astype(np.int64)
        with torch.random.fork_rng(devices=[]):
            for image, seed in zip(batch["inputs"], seeds, strict=True):
                torch.default_generator.manual_seed(int(seed))
                image.copy_(erase(image))
        return batch
