"""Batches in order: made by this process, or ahead of time by loader processes, with the same result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zerofit.data.base import Data, Dataset
from zerofit.data.order import Order


def default_workers(data: Data, ranks: int) -> int:
    """Loader processes a rank: none where a batch is an index operation, else up to 4 that share the cores."""
    if not data.train.decodes:
        return 0
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks))


def micro_batches(dataset: Dataset, order: Order, slices: Iterable[range], workers: int) -> Iterator[dict]:
    """For each range of global positions {"inputs", "labels", "positions": range, "indices": int64 array}.

    `slices` is consumed lazily (up to 2 * workers ahead) and may be endless. With workers > 0, loader processes
    live until the iterator is closed; they give exactly what workers=0 gives, in the same order.
    """
    maker = _Maker(dataset, order)
    return _from_processes(maker, slices, workers) if workers else map(maker.__getitem__, slices)


@dataclass(frozen=True)
class _Maker:
    """Looks like a data set whose samples are whole micro batches, indexed by their positions."""

    dataset: Dataset
    order: Order

    def __getitem__(self, positions: range) -> dict:
        indices = self.order.indices(positions.start, positions.stop)
        keys = self.order.keys(positions.start, positions.stop)
        return {**self.dataset.batch(indices, keys), "positions": positions, "indices": indices}


def _from_processes(maker: _Maker, slices: Iterable[range], workers: int) -> Iterator[dict]:
    from torch.utils.data import DataLoader

    # "forkserver" and not "fork": by now this process has CUDA, NCCL and tokenizer threads, which no fork survives.
    yield from DataLoader(
        maker,  # type: ignore[arg-type]
        sampler=slices,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=2,
        multiprocessing_context="forkserver",
    )


def _as_it_is(batch: dict) -> dict:
    return batch
