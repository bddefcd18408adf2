"""Data sets and data sources as the other modules see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zerofit.models.inputs import Inputs

if TYPE_CHECKING:
    import torch

Integers = Sequence[int] | np.ndarray  # of one dimension


class Dataset(ABC):
    """Samples by index. Can be pickled (loader processes get a copy) and is never changed."""

    decodes = False  # True where a batch costs so much time that loader processes pay
    draws = True  # False where samples have no randomness, so that `keys` need not be made
    ordered_in: int | None = None  # samples that are shuffled among themselves, where not all are with all

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: Integers, keys: Integers) -> dict[str, torch.Tensor]:
        """Return the samples `indices` as {"inputs", "labels"}, first dimension len(indices).

        Images: float32 (batch, channels, size, size) and int64 (batch,); rows of a table: float32 (batch, features).
        Text: int64 (batch, seq_len) both; labels that count in no loss are -100. Packed documents have "position_ids".
        `keys` holds one integer per sample, which fixes all of its randomness (augmentation, masking).
        """

    def sized(self, size: int) -> Dataset:
        """Return the same images with another size of their sides, in pixels."""
        return replace(cast(Any, self), size=size)

    @abstractmethod
    def targets(self, indices: Integers) -> int:
        """Count the labels of these samples that count in the loss, without reading or decoding any."""

    def trimmed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch without what is padding in all of its samples, where samples are padded."""
        return batch


class LabelledDataset(Dataset):
    """Images, or rows of a table, with one class label each."""

    def targets(self, indices: Integers) -> int:
        """Count one label per sample."""
        return len(indices)


@dataclass(frozen=True, kw_only=True)
class Data:
    """An opened source of data."""

    name: str  # as the user wrote it
    train: Dataset
    valid: Dataset
    inputs: Inputs  # what a model is fed
    # Text: mean -ln p(token) over the validation tokens, p being the token's frequency in the training tokens
    # (add-one smoothing over the vocabulary): the loss of a model that knows how often tokens occur and nothing else.
    unigram_entropy_nats: float | None = None
    decode: Callable[[list[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    end_id: int | None = None  # of texts to write: the token that ends one
    bad_samples: tuple[str, ...] = ()  # unreadable files that were skipped
    notes: tuple[str, ...] = ()  # sentences for the user
    counts: Mapping[str, int] = field(default_factory=dict)  # of conversations: how many were truncated, dropped, ...
