"""BERT's corruption of tokens, with an exact number of targets."""

from __future__ import annotations

import numpy as np

from zerofit.data.base import Integers
from zerofit.data.hashing import cell_hashes
from zerofit.spec.task import IGNORE_INDEX

SHARE = 0.15  # of a sample's tokens are targets
_WHERE, _HOW, _WHAT = 11, 12, 13  # independent streams of random numbers


def masked_count(real: np.ndarray) -> np.ndarray:
    """Targets of samples with so many real tokens: 15 % of them, rounded; the same whichever places are drawn."""
    return np.rint(SHARE * np.asarray(real)).astype(np.int64)


def mask_tokens(
    tokens: np.ndarray, real: np.ndarray, keys: Integers, mask_id: int, ordinary: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt int64 (batch, seq_len) tokens, of which the first `real` (batch,) of each row count.

    Exactly masked_count(real) places a row, drawn by its key, become targets: 80 % of them show `mask_id`,
    10 % one of the `ordinary` ids, 10 % what they showed before. Returns (inputs, labels), labels -100 elsewhere.
    """
    width = tokens.shape[1]
    draws = cell_hashes(keys, width, _WHERE)
    draws[np.arange(width) >= real[:, None]] = np.iinfo(np.uint64).max  # padding comes last and is never drawn
    ranks = draws.argsort(axis=1).argsort(axis=1)
    chosen = ranks < masked_count(real)[:, None]
    labels = np.where(chosen, tokens, IGNORE_INDEX)
    how = cell_hashes(keys, width, _HOW) % np.uint64(10)
    what = ordinary[(cell_hashes(keys, width, _WHAT) % np.uint64(len(ordinary))).astype(np.int64)]
    inputs = np.where(chosen & (how < 8), mask_id, tokens)
    return np.where(chosen & (how == 8), what, inputs), labels
