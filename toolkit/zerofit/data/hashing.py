"""Hashes and choices that are the same on every machine, unlike Python's own `hash`."""

from __future__ import annotations

import hashlib

import numpy as np


def mix64(values: np.ndarray) -> np.ndarray:
    """Mix uint64 into uint64 of the same shape by SplitMix64 (Steele et al., 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# Random numbers from keys instead of generators: sample i gets the same numbers in every process, batch and resumed
# run.
def sample_hashes(keys: object, stream: int) -> np.ndarray:
    """Return one uint64 per key. Different `stream` numbers give independent values of a key."""
    key = np.asarray(keys).astype(np.uint64)
    return mix64(mix64(key) ^ mix64(np.full_like(key, stream)))


def cell_hashes(keys: object, columns: int, stream: int) -> np.ndarray:
    """Return uint64 (keys, columns), each a pure function of its key, its column and `stream`."""
    # An odd factor spreads the columns over all 64 bits, and maps no two columns to the same number.
    rows = sample_hashes(keys, stream)[:, None]
    return mix64(rows + np.arange(columns, dtype=np.uint64)[None, :] * np.uint64(0xD1342543DE82EF95))


def name_hash(name: str) -> int:
    """Return 64 bits of BLAKE2b of a name."""
    # On Linux, file names may be invalid UTF-8. Python has such bytes as surrogates, which strict encoding refuses.
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest())


# Samples are held out by hash, not at random. So a file stays in its split on every machine, even if other files
# change.
def held_out_limit(hashes: np.ndarray, share: float) -> int:
    """Return the largest hash of a held-out sample: those with the smallest hashes are held out.

    They are a `share` of all, but at least one. `hashes` (uint64) must not be empty.
    """
    count = max(1, round(share * len(hashes)))
    return int(np.partition(hashes, count - 1)[count - 1])


def stratified_fifth(labels: np.ndarray) -> np.ndarray:
    """Return a bool mask over the samples with 20 % of each class, the same on every machine."""
    mask = np.zeros(len(labels), dtype=bool)
    generator = np.random.Generator(np.random.Philox(key=8))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        mask[generator.permutation(members)[: round(len(members) / 5)]] = True
    return mask


def text_digest(*parts: str) -> str:
    """Return 32 hexadecimal digits that identify a sequence of strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogateescape")
        state.update(len(encoded).to_bytes(8))  # so ("ab", "c") differs from ("a", "bc")
        state.update(encoded)
    return state.hexdigest()
