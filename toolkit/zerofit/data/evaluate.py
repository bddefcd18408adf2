"""Validation samples shared out over ranks: each exactly once, the same number of batches on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerofit.data.base import Dataset
from zerofit.data.hashing import sample_hashes
from zerofit.data.loader import made
from zerofit.spec.task import IGNORE_INDEX

_KEY_STREAM = 0x5EED  # masked samples look the same at every evaluation


def eval_indices(n: int, limit: int | None) -> np.ndarray:
    """Which of `n` samples an evaluation looks at: all, or `limit` of them evenly spread.

    Spread, because folders of images come sorted by class: the first thousand would be of one class.
    """
    count = n if limit is None else min(limit, n)
    return np.arange(count, dtype=np.int64) * n // max(count, 1)


def eval_targets(dataset: Dataset, limit: int | None) -> int:
    """How many labels count in an evaluation, over all ranks: what the summed loss is divided by."""
    return dataset.targets(eval_indices(len(dataset), limit))


def eval_batch_count(n: int, dp: int, micro: int, limit: int | None) -> int:
    """How many batches `eval_batches` gives on every rank."""
    return -(-len(eval_indices(n, limit)) // (dp * micro))


def eval_batches(
    dataset: Dataset, dp_rank: int, dp: int, micro: int, limit: int | None, workers: int = 0
) -> Iterator[dict]:
    """This rank's share: {"inputs", "labels", "indices": int64 (micro,), "real": bool (micro,)}, in a fixed order.

    Every rank gets the same number of batches of `micro` samples. What is missing in the last ones is filled with
    samples seen before, whose labels are all -100 and whose `real` is False. `workers`: see `micro_batches`.
    """
    maker = _EvalShare(dataset, dp_rank, dp, micro, eval_indices(len(dataset), limit))
    return made(maker, range(eval_batch_count(len(dataset), dp, micro, limit)), workers)


@dataclass(frozen=True)
class _EvalShare:
    dataset: Dataset
    dp_rank: int
    dp: int
    micro: int
    chosen: np.ndarray  # int64: the samples that all ranks look at together

    def __getitem__(self, step: int) -> dict:
        import torch

        places = (step * self.dp + self.dp_rank) * self.micro + np.arange(self.micro)
        real = places < len(self.chosen)
        indices = self.chosen[places % len(self.chosen)]
        keys = (sample_hashes(indices, _KEY_STREAM) >> np.uint64(1)).astype(np.int64)
        batch = self.dataset.batch(indices, keys)
        batch["labels"][torch.from_numpy(~real)] = IGNORE_INDEX
        return {**batch, "indices": indices, "real": real}
