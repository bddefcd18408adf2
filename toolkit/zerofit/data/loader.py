"""Batches in order: made by this process, or ahead of time by loader processes, with the same result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from zerofit.data.base import Data, Dataset
from zerofit.data.order import Order

# Tensors travel from loader processes in shared memory. Containers often have 64 MiB of it, and a process that
# finds it full dies of SIGBUS without a word; below this much, batches travel through a pipe instead.
ROOMY_BYTES = 1 << 30
# Making a small micro batch costs as much as making some at once, of about so many bytes together.
_BLOCK_BYTES = 1 << 16
_ALIGNMENT = 64  # bytes: of torch's own allocations, which kernels may depend on in the last bit
_PRELOADED = ["__main__", "torch", "torchvision.transforms.v2"]  # imported once, not by each loader process


Item = TypeVar("Item", contravariant=True)


class BatchMaker(Protocol[Item]):
    """Makes the batch that belongs to an item."""

    def __getitem__(self, item: Item, /) -> dict: ...


def default_workers(data: Data, ranks: int) -> int:
    """Loader processes a rank: none where a batch is an index operation, else up to 4 that share the cores."""
    if not data.train.decodes:
        return 0
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks))


def micro_batches(dataset: Dataset, order: Order, slices: Iterable[range], workers: int) -> Iterator[dict]:
    """For each range of global positions {"inputs", "labels", "positions": range, "indices": int64 array}.

    The ranges are not empty and, but for the last, of one length. They are consumed lazily (2 * workers ahead, or a
    block of about 64 KiB) and may go on without end. With workers > 0, loader processes live until the iterator is
    closed; they give exactly what workers=0 gives, in the same order. `indices` is not to be written to.
    """
    maker = _MicroBatches(dataset, order)
    if workers or dataset.decodes:
        return made(maker, slices, workers)
    return maker.in_blocks(iter(slices))


@dataclass(frozen=True)
class _MicroBatches:
    dataset: Dataset
    order: Order

    def __getitem__(self, positions: range) -> dict:
        return self._batches([positions])[0]

    def in_blocks(self, slices: Iterator[range]) -> Iterator[dict]:
        """The batches of these positions in order, several small ones made at a time once their size is known."""
        count = 1
        while block := list(islice(slices, count)):
            batches = self._batches(block)
            count = _in_a_block(batches[0])
            while batches:
                yield batches.pop(0)  # so that none is held here

    def _batches(self, block: list[range]) -> list[dict]:
        indices = np.concatenate([self.order.indices(p.start, p.stop) for p in block])
        keys = np.concatenate([self.order.keys(p.start, p.stop) for p in block]) if self.dataset.draws else indices
        sizes, whole = [len(p) for p in block], self.dataset.batch(indices, keys)
        # to autograd each part is a tensor of its own, which a model may write to as to any input
        parts = zip(*(tensor.unsafe_split_with_sizes(sizes) for tensor in whole.values()), strict=True)
        mine = np.split(indices, np.cumsum(sizes)[:-1])
        return [
            {**dict(zip(whole, tensors, strict=True)), "positions": positions, "indices": own}
            for positions, tensors, own in zip(block, parts, mine, strict=True)
        ]


def _in_a_block(batch: dict) -> int:
    """How many batches like this one are made at a time."""
    x, y = batch["inputs"], batch["labels"]
    lies_alike = not x.is_floating_point() or x[0].nbytes % _ALIGNMENT == 0
    return max(1, _BLOCK_BYTES // (x.nbytes + y.nbytes)) if lies_alike else 1


def made(maker: BatchMaker[Item], items: Iterable[Item], workers: int) -> Iterator[dict]:
    """`maker[item]` for each item, in order: here, or in `workers` processes."""
    return _from_processes(maker, items, workers) if workers else map(maker.__getitem__, items)


def _from_processes(maker: BatchMaker[Item], items: Iterable[Item], workers: int) -> Iterator[dict]:
    import multiprocessing

    import torch
    from torch.utils.data import DataLoader

    # "forkserver" and not "fork": by now this process has CUDA, NCCL and tokenizer threads, which no fork survives.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    roomy = shutil.disk_usage("/dev/shm").free >= ROOMY_BYTES
    batches = DataLoader(
        cast(Any, maker),  # torch types it as a Dataset, and takes whatever has __getitem__
        sampler=items,
        batch_size=None,
        collate_fn=cast(Any, _as_it_is if roomy else _through_a_pipe),  # typed for a list: batch_size=None gives one
        num_workers=workers,
        prefetch_factor=2,
        multiprocessing_context=context,
        generator=torch.Generator(),  # else it would draw from the one that training draws from
    )
    convert: Callable[[dict], dict] = _as_it_is if roomy else _from_a_pipe
    yield from map(convert, batches)


def _as_it_is(batch: dict) -> dict:
    return batch


def _through_a_pipe(batch: dict) -> dict:
    """NumPy arrays are pickled with their content, tensors as a reference to shared memory."""
    return {**batch, "inputs": batch["inputs"].numpy(), "labels": batch["labels"].numpy()}


def _from_a_pipe(batch: dict) -> dict:
    import torch

    return {key: torch.from_numpy(v) if key in ("inputs", "labels") else v for key, v in batch.items()}
