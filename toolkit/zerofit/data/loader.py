"""The order of samples, and batches that this process or loader processes make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any, cast

import numpy as np

from zerofit.data.base import Data, Dataset
from zerofit.data.hashing import mix64, sample_hashes
from zerofit.data.mixing import MicroSlice, Mixing
from zerofit.spec.model_facts import IGNORE_INDEX

# Loader processes pass tensors in shared memory. Containers often have 64 MiB of it, and a process dies of SIGBUS
# when this memory is full. If less than ROOMY_BYTES is free, batches go through a pipe instead.
ROOMY_BYTES = 1 << 30
# Several small micro batches, together of about this size, are made at once: this is as fast as making one of them.
_BLOCK_BYTES = 1 << 16
_ALIGNMENT = 64  # bytes, as in torch's allocations, on which the last bit of kernels may depend
_PRELOADED = ["__main__", "torch", "torchvision.transforms.v2"]  # imported once, not per loader process
_KEY_STREAM = 0x5EED  # fixed, so that masked samples are the same in every evaluation


# The order of samples, for 4 samples and a global batch of 3:
#
#     position    0 1 2 3 | 4 5 6 7 | 8 ...
#     sample      2 0 3 1 | 3 1 0 2 | 1 ...     a permutation in each epoch
#     step        0 0 0 1   1 1 2 2   2 ...
#
# A step is a range of positions that does not depend on the number of ranks. So a run resumes at any position, in any
# layout.
@dataclass(frozen=True)
class Order:
    """An endless stream of sample indices; every `n` positions are an epoch of all samples.

    The order is a pure function of seed and position. Ranks, workers and batch sizes do not change the order; they only
    choose positions.
    """

    n: int  # number of samples in the data set
    seed: int
    block: int | None = None  # shuffle only within blocks of this many samples, in order (a stream)

    @classmethod
    def of(cls, dataset: Dataset, seed: int) -> Order:
        """Return the order in which training visits a data set."""
        return cls(len(dataset), seed, block=dataset.ordered_in)

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return sample indices, int64 (stop - start,), at positions start <= p < stop; read-only."""
        parts = []
        while start < stop:
            size = self.block or self.n
            epoch, offset = divmod(start, size)
            end = min(stop, (epoch + 1) * size)
            part = _epoch_order(size, self.seed % 2**64, epoch)[offset : offset + end - start]
            parts.append(part + epoch * size if self.block else part)
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Return an int64 of at least 0 per position, the key of the sample's randomness."""
        # The seed is mixed first: else the keys of seed 1 would be those of seed 0, shifted by one position.
        positions = np.arange(start, stop, dtype=np.uint64)
        seed = mix64(np.array([self.seed % 2**64], dtype=np.uint64))
        return (mix64(positions + seed) >> np.uint64(1)).astype(np.int64)


@lru_cache(maxsize=3)
def _epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(n)."""
    # A counter-based generator has a stream for each key, so no epoch depends on those before it.
    key = np.array([seed, epoch], dtype=np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(n)
    order.setflags(write=False)  # all callers share this array
    return order


def default_workers(data: Data, ranks: int) -> int:
    """Return the loader processes per rank: at most 4, and 0 if batches need no decoding."""
    if not data.train.decodes:
        return 0
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks))


def micro_batches(
    dataset: Dataset,
    order: Order,
    slices: Iterable[range | MicroSlice],
    workers: int,
    mixing: Mixing | None = None,
    pinned: bool = False,
) -> Iterator[dict]:
    """Yield {"inputs", "labels", "positions": range, "indices": int64 array} for each slice.

    `slices`: ranges that are not empty. All ranges except the last have the same length. Their number may be infinite,
    because each range is read shortly before its use. Loader processes read 2 * workers ranges ahead. Without loader
    processes, all ranges of a block of about 64 KiB are read together.

    A slice may also be a MicroSlice: a range, and the image settings of its step. If its field `before` is set,
    `mixing` mixes the images.

    `workers`: number of loader processes, which live until the iterator is closed. Batches and their order do not
    depend on this number.

    `pinned`: loader processes return pinned memory, so copies to a GPU overlap with computation. "positions" is then a
    list.
    """
    maker, remaining = _MicroBatches(dataset, order, mixing), iter(slices)
    first = next(remaining, None)
    if first is None:
        return iter(())
    every = chain([first], remaining)
    if workers or dataset.decodes or isinstance(first, MicroSlice):
        return _batches(maker, every, workers, pinned)
    return maker.in_blocks(cast(Iterator[range], every))


@dataclass(frozen=True)
class _MicroBatches:
    """Makes the micro batches of training, in this process or in a loader process."""

    dataset: Dataset
    order: Order
    mixing: Mixing | None = None

    def __getitem__(self, item: range | MicroSlice) -> dict:
        return self._of_step(item) if isinstance(item, MicroSlice) else self._block([item])[0]

    def _of_step(self, micro_slice: MicroSlice) -> dict:
        """Return a micro batch with its step's image size, mixed if the step requires it."""
        dataset = self.dataset if micro_slice.size is None else self.dataset.sized(micro_slice.size)
        positions = micro_slice.positions
        indices = self.order.indices(positions.start, positions.stop)
        keys = self.order.keys(positions.start, positions.stop)
        before = micro_slice.before
        if before is None or self.mixing is None:
            return {**dataset.batch(indices, keys), "positions": positions, "indices": indices}
        # The sample before the micro batch is only made to be mixed into its first image.
        batch = dataset.batch(
            np.concatenate([self.order.indices(before, before + 1), indices]),
            np.concatenate([self.order.keys(before, before + 1), keys]),
        )
        images, labels = self.mixing(batch["inputs"], batch["labels"], micro_slice.key)
        return {"inputs": images[1:], "labels": labels[1:], "positions": positions, "indices": indices}

    # Indexing takes about as long for one sample as for a hundred, so small micro batches are made together and cut.
    # Cuts must be aligned, since kernels may round differently at other addresses.
    def in_blocks(self, slices: Iterator[range]) -> Iterator[dict]:
        """Yield micro batches, several of which are made at once if they are small."""
        count = 1
        while ranges := list(islice(slices, count)):
            batches = self._block(ranges)
            inputs, labels = batches[0]["inputs"], batches[0]["labels"]
            aligned = not inputs.is_floating_point() or inputs[0].nbytes % _ALIGNMENT == 0
            count = max(1, _BLOCK_BYTES // (inputs.nbytes + labels.nbytes)) if aligned else 1
            while batches:
                yield batches.pop(0)  # so that no reference to the batch remains here

    def _block(self, ranges: list[range]) -> list[dict]:
        """Return the micro batches of these ranges of positions, parts of the same tensors."""
        indices = np.concatenate([self.order.indices(p.start, p.stop) for p in ranges])
        keys = np.concatenate([self.order.keys(p.start, p.stop) for p in ranges]) if self.dataset.draws else indices
        sizes, block = [len(p) for p in ranges], self.dataset.batch(indices, keys)
        # "Unsafe", since models may write to a part: autograd then treats each part as a separate tensor.
        parts = zip(*(tensor.unsafe_split_with_sizes(sizes) for tensor in block.values()), strict=True)
        indices_of_parts = np.split(indices, np.cumsum(sizes)[:-1])
        return [
            {**self.dataset.trimmed(dict(zip(block, tensors, strict=True))), "positions": positions, "indices": part}
            for positions, tensors, part in zip(ranges, parts, indices_of_parts, strict=True)
        ]


def eval_indices(n: int, limit: int | None) -> np.ndarray:
    """Return the samples to evaluate: all `n`, or `limit` samples evenly spaced."""
    count = n if limit is None else min(limit, n)
    # Image folders are sorted by class: the first thousand samples could be one class.
    return np.arange(count, dtype=np.int64) * n // max(count, 1)


def eval_batch_count(n: int, dp: int, micro: int, limit: int | None) -> int:
    """Return the number of batches that `eval_batches` yields on every rank."""
    return -(-len(eval_indices(n, limit)) // (dp * micro))


def eval_batches(
    dataset: Dataset, dp_rank: int, dp: int, micro: int, limit: int | None, workers: int = 0, pinned: bool = False
) -> Iterator[dict]:
    """Yield this rank's {"inputs", "labels", "indices": int64 (micro,), "real": bool (micro,)}.

    The order is fixed. Every sample is in one batch of one rank, and every rank gets the same number of batches of
    `micro` samples. The last batches are filled up with earlier samples, whose labels are -100 and whose `real` is
    False. `workers` and `pinned`: see `micro_batches`.
    """
    maker = _EvalShare(dataset, dp_rank, dp, micro, eval_indices(len(dataset), limit))
    return _batches(maker, range(eval_batch_count(len(dataset), dp, micro, limit)), workers, pinned)


@dataclass(frozen=True)
class _EvalShare:
    """Makes one rank's batches of an evaluation."""

    dataset: Dataset
    dp_rank: int
    dp: int
    micro: int
    chosen: np.ndarray  # int64: samples of all ranks

    def __getitem__(self, step: int) -> dict:
        import torch

        # All ranks need the same number of batches: in each of them they meet in collectives. Positions after the last
        # sample wrap around, and are marked as not real.
        positions = (step * self.dp + self.dp_rank) * self.micro + np.arange(self.micro)
        real = positions < len(self.chosen)
        indices = self.chosen[positions % len(self.chosen)]
        keys = (sample_hashes(indices, _KEY_STREAM) >> np.uint64(1)).astype(np.int64)
        batch = self.dataset.batch(indices, keys)
        batch["labels"][torch.from_numpy(~real)] = IGNORE_INDEX
        return {**self.dataset.trimmed(batch), "indices": indices, "real": real}


def _batches(maker: _MicroBatches | _EvalShare, items: Iterable[Any], workers: int, pinned: bool) -> Iterator[dict]:
    """Yield `maker`'s batch for each item, made in this process or in loader processes."""
    return _from_processes(maker, items, workers, pinned) if workers else map(maker.__getitem__, items)


def _from_processes(
    maker: _MicroBatches | _EvalShare, items: Iterable[object], workers: int, pinned: bool
) -> Iterator[dict]:
    """Yield `maker`'s batch for each item, made in `workers` loader processes."""
    import multiprocessing

    import torch
    from torch.utils.data import DataLoader

    # "forkserver", because this process has CUDA, NCCL and tokenizer threads, which do not survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    roomy = shutil.disk_usage("/dev/shm").free >= ROOMY_BYTES
    batches = DataLoader(
        cast(Any, maker),  # typed as a Dataset, but anything with __getitem__ works
        sampler=items,
        batch_size=None,
        # typed for a list, but batch_size=None passes one item
        collate_fn=cast(Any, _unchanged if roomy else _to_arrays),
        num_workers=workers,
        pin_memory=pinned,
        prefetch_factor=2,
        multiprocessing_context=context,
        generator=torch.Generator(),  # otherwise it would use training's generator
    )
    yield from batches if roomy else map(_to_tensors, batches)


def _unchanged(batch: dict) -> dict:  # the default of DataLoader converts arrays
    return batch


def _to_arrays(batch: dict) -> dict:
    """Convert tensors to NumPy arrays, which are pickled by content, not by shared memory."""
    import torch

    return {key: v.numpy() if isinstance(v, torch.Tensor) else v for key, v in batch.items()}


def _to_tensors(batch: dict) -> dict:
    import torch

    numbers = ("indices", "real")  # these stay NumPy arrays
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) and k not in numbers else v for k, v in batch.items()}
