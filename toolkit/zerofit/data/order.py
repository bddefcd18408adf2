"""In which order samples are seen: a pure function of seed and position, so that any run can resume anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from zerofit.data.hashing import mix64


@dataclass(frozen=True)
class Order:
    """An endless stream of sample indices; every `n` positions are one epoch, each sample once in it.

    Ranks, workers and batch sizes do not enter: they only choose which positions they take.
    """

    n: int  # samples in the data set
    seed: int
    shuffle: bool = True

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Sample indices, int64 (stop - start,), at the global positions start <= p < stop. Not to be written to."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.n)
            end = min(stop, (epoch + 1) * self.n)
            parts.append(self._epoch(epoch)[offset : offset + end - start])
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def keys(self, start: int, stop: int) -> np.ndarray:
        """One non-negative int64 a position: fixes the randomness of the sample seen there."""
        positions = np.arange(start, stop, dtype=np.uint64)
        seed = mix64(np.array([self.seed % 2**64], dtype=np.uint64))
        return (mix64(positions + seed) >> np.uint64(1)).astype(np.int64)

    def _epoch(self, epoch: int) -> np.ndarray:
        return _permutation(self.n, self.seed % 2**64, epoch) if self.shuffle else _identity(self.n)


@lru_cache(maxsize=3)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    key = np.array([seed, epoch], dtype=np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(n)
    order.setflags(write=False)  # it is shared by all who ask
    return order


@lru_cache(maxsize=1)
def _identity(n: int) -> np.ndarray:
    order = np.arange(n)
    order.setflags(write=False)
    return order
