"""Samples of text: windows of seq_len tokens, for causal and masked language models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerofit.data.base import Dataset, Integers
from zerofit.data.hashing import cell_hashes
from zerofit.data.token_cache import TokenFile
from zerofit.spec.model_facts import IGNORE_INDEX

MASKED_SHARE = 0.15  # share of a sample's tokens that are targets
_WHERE, _HOW, _WHAT = 11, 12, 13  # independent streams of random numbers


@dataclass(frozen=True, kw_only=True)
class _TextWindows(Dataset):
    file: TokenFile
    tokens: int
    seq_len: int  # L
    pad_id: int

    def _gather(self, indices: Integers, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows, int64 (batch, width), and the number of real tokens in each, (batch,).

        A window starts at token index * L and is padded at the end.
        """
        tokens, stride = self.file.array(), self.seq_len
        starts = np.asarray(indices, dtype=np.int64) * stride
        real = np.minimum(len(tokens) - starts, width)
        count = (len(tokens) - width) // stride + 1 if len(tokens) >= width else 0
        # A view of all complete windows, which may overlap by a token, so each window is copied as one block.
        item = tokens.itemsize
        complete = np.lib.stride_tricks.as_strided(tokens, (count, width), (stride * item, item), writeable=False)
        windows = np.full((len(starts), width), self.pad_id, dtype=np.int64)
        is_complete = real == width
        windows[is_complete] = complete[starts[is_complete] // stride]
        for window in np.flatnonzero(~is_complete):
            windows[window, : real[window]] = tokens[starts[window] :]
        return windows, real


#     tokens      t0 t1 t2 t3 t4 t5 t6 t7          seq_len 3
#     window 0    t0 t1 t2         labels t1 t2 t3
#     window 1    t3 t4 t5         labels t4 t5 t6
#     window 2    t6 pad pad       labels t7 -100 -100
@dataclass(frozen=True, kw_only=True)
class CausalText(_TextWindows):
    """Windows with the inputs tokens[i*L : (i+1)*L]; labels are the same tokens, shifted by one.

    Every token except tokens[0] is a label exactly once. The last window is padded. The padding has labels -100.
    """

    draws = False

    def __len__(self) -> int:
        return -(-(self.tokens - 1) // self.seq_len)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch; `keys` are unused."""
        import torch

        windows, real = self._gather(indices, self.seq_len + 1)
        inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        labels[np.arange(1, self.seq_len + 1) >= real[:, None]] = IGNORE_INDEX
        return {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def targets(self, indices: Integers) -> int:
        """Count the windows' tokens; the last window may have fewer."""
        remaining = self.tokens - 1 - np.asarray(indices, dtype=np.int64) * self.seq_len
        return int(np.minimum(remaining, self.seq_len).sum())


@dataclass(frozen=True, kw_only=True)
class MaskedText(_TextWindows):
    """Windows tokens[i*L : (i+1)*L]; the sample's key selects exactly 15 % (rounded) as targets."""

    mask_id: int
    ordinary_ids: np.ndarray  # int64: possible replacements of a token

    def __len__(self) -> int:
        return -(-self.tokens // self.seq_len)

    def batch(self, indices: Integers, keys: Integers) -> dict:
        """See Dataset.batch."""
        import torch

        windows, real = self._gather(indices, self.seq_len)
        inputs, labels = mask_tokens(windows, real, keys, self.mask_id, self.ordinary_ids)
        return {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

    def targets(self, indices: Integers) -> int:
        """Count 15 % of each window's tokens, rounded."""
        remaining = self.tokens - np.asarray(indices, dtype=np.int64) * self.seq_len
        return int(masked_count(np.minimum(remaining, self.seq_len)).sum())


def masked_count(real: np.ndarray) -> np.ndarray:
    """Return the number of targets in samples with `real` tokens: 15 %, rounded."""
    return np.rint(MASKED_SHARE * np.asarray(real)).astype(np.int64)


# BERT draws 15 % of tokens independently, so their number varies. Here each sample has exactly 15 %: the tokens with
# the smallest hashes. So the divisor of a global batch's loss is known before its samples are made.
def mask_tokens(
    tokens: np.ndarray, real: np.ndarray, keys: Integers, mask_id: int, ordinary: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mask tokens, int64 (batch, seq_len); return inputs, and labels: -100 except for targets.

    In each row only the first `real` (batch,) tokens count, and the key selects exactly masked_count(real) of them as
    targets. 80 % of the targets become `mask_id`, 10 % become one of the `ordinary` ids, and 10 % stay.
    """
    width = tokens.shape[1]
    draws = cell_hashes(keys, width, _WHERE)
    draws[np.arange(width) >= real[:, None]] = np.iinfo(np.uint64).max  # padding comes last and is never drawn
    ranks = draws.argsort(axis=1).argsort(axis=1)  # the rank of each token among its row's, by hash
    chosen = ranks < masked_count(real)[:, None]
    labels = np.where(chosen, tokens, IGNORE_INDEX)
    draw = cell_hashes(keys, width, _HOW) % np.uint64(10)
    what = ordinary[(cell_hashes(keys, width, _WHAT) % np.uint64(len(ordinary))).astype(np.int64)]
    inputs = np.where(chosen & (draw < 8), mask_id, tokens)
    return np.where(chosen & (draw == 8), what, inputs), labels
