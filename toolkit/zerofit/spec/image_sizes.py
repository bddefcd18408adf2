"""Image sizes that grow while a model trains, by share of the training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Sizes in pixels, and the share of the training at which each ends.

    >>> sizes = ImageSizes.parse("128:0.5,160:0.75,192")
    >>> [sizes.at(step, 100) for step in (0, 49, 50, 75, 99)]
    [128, 128, 160, 192, 192]
    """

    sizes: tuple[int, ...]
    ends: tuple[float, ...]  # the last one is 1

    @classmethod
    def parse(cls, text: str) -> ImageSizes:
        """Return the sizes that a text names. Raises ValueError."""
        parts = [part.strip().partition(":") for part in text.split(",")]
        try:
            sizes = tuple(int(size) for size, _, _ in parts)
            ends = tuple(float(end) if colon else 1.0 for _, colon, end in parts)
        except ValueError:
            raise ValueError(f"{text!r} is not a list of sizes, like 128:0.5,160:0.75,192") from None
        rising = all(a < b for a, b in pairwise(ends))
        if ends[0] <= 0 or not rising or ends[-1] != 1:
            raise ValueError("each size ends at a later share of the training than the one before, and the last at 1")
        if sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes grow: the last one, which the model is evaluated at, is the largest")
        return cls(sizes=sizes, ends=ends)

    @property
    def largest(self) -> int:
        """The size at the end."""
        return self.sizes[-1]

    def at(self, step: int, steps: int) -> int:
        """Return the size of a step, counted from 0, of so many."""
        return next(size for size, end in zip(self.sizes, self.ends, strict=True) if step < end * steps or end == 1)
