"""Settings shared by the images of a step: their size, and how they are mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zerofit.data.base import Dataset, Integers, LabelledDataset
from zerofit.data.hashing import sample_hashes
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.run import Run

if TYPE_CHECKING:
    import torch

_MIXED, _ERASED = 21, 22  # streams of random numbers per step, and per sample


# An image is mixed with the previous one in the global batch, the first with the last, as in torchvision:
#
#     global batch    a b c d | e f g h        two micro batches
#     mixed with      h a b c | d e f g        the first one also makes h, the second one d
#
# A rank makes one extra sample for each micro batch. So the images do not depend on the number of ranks.
@dataclass(frozen=True, kw_only=True)
class MicroSlice:
    """The samples of one micro batch, and the settings of their step."""

    positions: range
    size: int | None = None  # image size of the step, pixels per side; None: the data's size
    before: int | None = None  # position of the image that is mixed with the first image; None: no mixing
    key: int = 0  # key of the step's random numbers


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """MixUp or CutMix of full batches by torchvision, with equal probability if both are set."""

    mixup: float | None  # alpha of the beta distribution of the mixing ratio
    cutmix: float | None  # the same
    classes: int

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image (batch, channels, size, size) and label (batch,) with the previous one.

        Labels become float32 (batch, classes). `key` determines the random numbers, which all images share.
        """
        import torch
        from torchvision.transforms import v2

        ways: list[Callable[..., object]] = []
        if self.mixup is not None:
            ways.append(v2.MixUp(alpha=self.mixup, num_classes=self.classes))
        if self.cutmix is not None:
            ways.append(v2.CutMix(alpha=self.cutmix, num_classes=self.classes))
        # torchvision has no argument for a generator, so it draws from torch's, whose state is restored after it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            return v2.RandomChoice(ways)(images, labels)


@dataclass(frozen=True, kw_only=True)
class StepImages:
    """Settings of a run for the images of each step."""

    steps: int
    sizes: ImageSizes | None
    mixing: Mixing | None

    @classmethod
    def of(cls, run: Run, steps: int, inputs: Inputs | None) -> StepImages | None:
        """Return the settings of this run; None if it has no such settings."""
        sizes = ImageSizes.parse(run.image_sizes) if run.image_sizes else None
        mixing = None
        if mixes(run) and isinstance(inputs, ImageInputs):
            mixing = Mixing(mixup=run.mixup, cutmix=run.cutmix, classes=inputs.classes)
        return cls(steps=steps, sizes=sizes, mixing=mixing) if sizes or mixing else None

    def slice(self, positions: range, step: int, batch: range, first_key: int) -> MicroSlice:
        """Return the samples of a micro batch with the settings of their step.

        `batch`: positions of the step's global batch. `first_key`: key of the global batch's first sample.
        """
        size = self.sizes.at(step, self.steps) if self.sizes else None
        if self.mixing is None:
            return MicroSlice(positions=positions, size=size)
        before = positions.start - 1 if positions.start > batch.start else batch.stop - 1
        key = int(sample_hashes([first_key], _MIXED)[0] >> np.uint64(1))
        return MicroSlice(positions=positions, size=size, before=before, key=key)


def mixes(run: Run) -> bool:
    """Return whether a run mixes images. If it does, labels are probabilities."""
    return run.mixup is not None or run.cutmix is not None


@dataclass(frozen=True, kw_only=True)
class ErasedImages(LabelledDataset):
    """Images with a randomly erased rectangle (torchvision's RandomErasing after scaling)."""

    images: Dataset
    odds: float

    @property
    def decodes(self) -> bool:
        """Whether loader processes are useful."""
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
