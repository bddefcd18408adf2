"""Interfaces of data sets and data sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from zerofit.models.inputs import Inputs
from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Integers = Sequence[int] | np.ndarray  # one-dimensional
NAMED = 20  # limit of problems in an error


def data_error(kind: str, message: str, hint: str = "") -> UserError:
    """Return the error for data that cannot be used."""
    return UserError(Problem(kind=kind, message=message, hint=hint, where="--data"))


# An error with all bad places costs one more pass at most. With one place per error, each would cost an attempt.
def without_problems(items: Iterable[T | Problem]) -> Iterator[T]:
    """Yield all items but problems. Raise them at the end, or at the 20th, as one UserError."""
    problems: list[Problem] = []
    for item in items:
        if not isinstance(item, Problem):
            yield item
            continue
        problems.append(item)
        if len(problems) == NAMED:
            break
    if problems:
        raise UserError(*problems)


class Dataset(ABC):
    """A data set that never changes, with samples by index.

    It can be pickled, because each loader process gets a copy.
    """

    decodes = False  # True if making batches is slow enough to need loader processes
    draws = True  # False if samples have no randomness, so `keys` are not needed
    ordered_in: int | None = None  # samples are shuffled only within blocks of this many; None: over all

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: Integers, keys: Integers) -> dict[str, torch.Tensor]:
        """Return the samples `indices` as {"inputs", "labels"}, of first dimension len(indices).

        Images: float32 (batch, channels, size, size) and int64 (batch,); rows of a table: float32 (batch, features).
        Text: both are int64 (batch, seq_len). The loss ignores labels of -100. Packed documents have "position_ids".
        `keys`: one integer per sample, which determines its randomness (augmentation, masking).
        """

    def sized(self, size: int) -> Dataset:
        """Return the same images with sides of another size, in pixels."""
        return replace(cast(Any, self), size=size)

    @abstractmethod
    def targets(self, indices: Integers) -> int:
        """Return the number of these samples' labels that count in the loss; decodes no sample."""

    def trimmed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch without the columns that are padding in every sample."""
        return batch


class LabelledDataset(Dataset):
    """Images or rows of a table with one class label each."""

    def targets(self, indices: Integers) -> int:
        """Count one label per sample."""
        return len(indices)


@dataclass(frozen=True, kw_only=True)
class Data:
    """An opened source of data."""

    name: str  # the name as the user wrote it
    train: Dataset
    valid: Dataset
    inputs: Inputs  # the model's inputs
    # Text: mean -ln p(token) over the validation tokens, where p is the token's frequency in the training tokens with
    # add-one smoothing: the loss of a model that predicts by token frequency alone.
    unigram_entropy_nats: float | None = None
    decode: Callable[[list[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    end_id: int | None = None  # id of the token that ends a generated text
    notes: tuple[str, ...] = ()  # notes for the user
    counts: Mapping[str, int] = field(default_factory=dict)  # conversations: how many were truncated, dropped, ...
