"""Image sizes that grow during training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Sizes in pixels, and the share of the steps at which each size ends.

    >>> sizes = ImageSizes.parse("128:0.5,160:0.75,192")
    >>> [sizes.at(step, 100) for step in (0, 49, 50, 75, 99)]
    [128, 128, 160, 192, 192]
    """

    sizes: tuple[int, ...]
    ends: tuple[float, ...]  # the last one is 1

    @classmethod
    def parse(cls, text: str) -> ImageSizes:
        """Parse sizes like "128:0.5,160:0.75,192". Raises ValueError."""
        parts = [part.strip().partition(":") for part in text.split(",")]
        try:
            sizes = tuple(int(size) for size, _, _ in parts)
            ends = tuple(float(end) if colon else 1.0 for _, colon, end in parts)
        except ValueError:
            raise ValueError(f"{text!r} is not a list of sizes, like 128:0.5,160:0.75,192") from None
        rising = all(a < b for a, b in pairwise(ends))
        if ends[0] <= 0 or not rising or ends[-1] != 1:
            raise ValueError("SIZE:END: each END must be larger than the one before, and the last END must be 1")
        if sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes must grow: the last size, used for evaluation, must be the largest")
        return cls(sizes=sizes, ends=ends)

    @property
    def largest(self) -> int:
        """The last and largest size."""
        return self.sizes[-1]

    def at(self, step: int, steps: int) -> int:
        """Return the size at a step (from 0) of `steps`."""
        return next(size for size, end in zip(self.sizes, self.ends, strict=True) if step < end * steps or end == 1)
