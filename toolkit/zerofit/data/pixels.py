"""Images that fit into memory: a batch is a few array operations, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerofit.data.base import Dataset, Integers
from zerofit.data.hashing import sample_hashes


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Pixel values become (value - mean) / std, one pair a channel, both in units of the stored values."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def symmetric(cls, channels: int, largest: float) -> Scaling:
        """0 becomes -1 and `largest` 1: the range of a generator that ends in tanh."""
        return cls(mean=(largest / 2,) * channels, std=(largest / 2,) * channels)


@dataclass(frozen=True, kw_only=True)
class PixelImages(Dataset):
    """Images as one uint8 array, scaled (and, for training, shifted and mirrored) a batch at a time."""

    pixels: np.ndarray  # uint8 (n, channels, height, width)
    labels: np.ndarray  # int64 (n,)
    scaling: Scaling
    size: int  # height and width that the model is fed
    shift: int = 0  # pixels up to which an image is moved, the gap filled with 0 (pad and crop)
    mirror: bool = False  # half of the images, left to right

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def draws(self) -> bool:
        """Whether images are shifted or mirrored by chance."""
        return bool(self.shift or self.mirror)

    @cached_property
    def _mean_and_std(self) -> tuple:
        import torch

        return tuple(torch.tensor(v).view(1, -1, 1, 1) for v in (self.scaling.mean, self.scaling.std))

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch."""
        import torch

        chosen = np.asarray(indices)
        pixels = self.pixels[chosen]
        if self.shift:
            pixels = _shifted(pixels, keys, self.shift)
        if self.mirror:
            pixels = _mirrored(pixels, keys)
        images = _resized(torch.from_numpy(pixels).float(), self.size)
        mean, std = self._mean_and_std
        return {"inputs": images.sub_(mean).div_(std), "labels": torch.from_numpy(self.labels[chosen])}

    def targets(self, indices: Integers) -> int:
        """One label an image."""
        return len(indices)


def _shifted(pixels: np.ndarray, keys: Integers, by: int) -> np.ndarray:
    """Pad by `by` on each side and cut the old size out at a random place."""
    n, _, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (by, by), (by, by)))
    cuts = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    down, right = (sample_hashes(keys, stream) % np.uint64(2 * by + 1) for stream in (1, 2))
    return cuts[np.arange(n), :, down.astype(np.int64), right.astype(np.int64)]


def _mirrored(pixels: np.ndarray, keys: Integers) -> np.ndarray:
    chosen = (sample_hashes(keys, 3) >> np.uint64(63)).astype(bool)
    pixels[chosen] = pixels[chosen, ..., ::-1]
    return pixels


def _resized(images, size: int):
    """float32 (batch, channels, height, width) at the asked size; untouched where it has that already."""
    if images.shape[-2:] == (size, size):
        return images
    from torch.nn.functional import interpolate

    return interpolate(images, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
