"""Samples of text: windows of seq_len tokens cut from one long row of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerofit.data.base import Dataset, Integers
from zerofit.data.masking import mask_tokens, masked_count
from zerofit.data.token_cache import TokenFile
from zerofit.spec.task import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class CausalText(Dataset):
    """Window i: inputs tokens[i*L : (i+1)*L], labels the same one further on.

    Every token but the row's very first is a label exactly once. The last window's rest is padding, labels -100.
    """

    draws = False

    file: TokenFile
    tokens: int
    seq_len: int  # L
    pad_id: int

    def __len__(self) -> int:
        return -(-(self.tokens - 1) // self.seq_len)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; `keys` are not used."""
        import torch

        windows, real = _gather(self.file, indices, self.seq_len, self.seq_len + 1, self.pad_id)
        inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        labels[np.arange(1, self.seq_len + 1) >= real[:, None]] = IGNORE_INDEX
        return {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def targets(self, indices: Integers) -> int:
        """The window's tokens; fewer in the last one."""
        left = self.tokens - 1 - np.asarray(indices, dtype=np.int64) * self.seq_len
        return int(np.minimum(left, self.seq_len).sum())


@dataclass(frozen=True, kw_only=True)
class MaskedText(Dataset):
    """Window i: tokens[i*L : (i+1)*L] with 15 % of them (exactly, rounded) made targets by the sample's key."""

    file: TokenFile
    tokens: int
    seq_len: int  # L
    pad_id: int
    mask_id: int
    ordinary_ids: np.ndarray  # int64: what a token may be replaced with

    def __len__(self) -> int:
        return -(-self.tokens // self.seq_len)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch."""
        import torch

        windows, real = _gather(self.file, indices, self.seq_len, self.seq_len, self.pad_id)
        inputs, labels = mask_tokens(windows, real, keys, self.mask_id, self.ordinary_ids)
        return {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def targets(self, indices: Integers) -> int:
        """15 % of each window's tokens, rounded."""
        left = self.tokens - np.asarray(indices, dtype=np.int64) * self.seq_len
        return int(masked_count(np.minimum(left, self.seq_len)).sum())


def _gather(file: TokenFile, indices: Integers, stride: int, width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 (batch, width) from index * stride on, padded behind the last, and how many are real (batch,)."""
    row = file.array()
    starts = np.asarray(indices, dtype=np.int64) * stride
    real = np.minimum(len(row) - starts, width)
    full = (len(row) - width) // stride + 1 if len(row) >= width else 0
    # A view of all whole windows: taking rows of it copies each window as one block.
    step = row.itemsize
    whole = np.lib.stride_tricks.as_strided(row, (full, width), (stride * step, step), writeable=False)
    windows = np.full((len(starts), width), pad_id, dtype=np.int64)
    is_whole = real == width
    windows[is_whole] = whole[starts[is_whole] // stride]
    for place in np.flatnonzero(~is_whole):
        windows[place, : real[place]] = row[starts[place] :]
    return windows, real
