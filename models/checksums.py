"""Compute checksums of weights."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from zerofit.models.partial import name_without_adapters

PIECE = 1 << 22  # elements processed at a time
WORD = 1 << 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15  # odd, with well-mixed bits (2^64 / golden ratio)


def part_checksum(name: str, part: Tensor, start: int = 0) -> int:
    """Return what a part of a flattened weight adds to a checksum, modulo 2^64.

    `start`: index of the part's first element in the weight.
    """
    flat, total = part.detach().reshape(-1), 0
    key = xxhash.xxh64_intdigest(name_without_adapters(name).encode())
    for first in range(0, flat.numel(), PIECE):
        # sum over elements of (bits + 1) * (odd factor of the element's position and the weight's name), modulo 2^64
        # Without the added 1, zeros would not count. Odd factors have an inverse modulo 2^64, so a change of one
        # element always changes the sum.
        piece = flat[first : first + PIECE].contiguous()
        bits = piece.view(_BITS[piece.element_size()]).long() + 1
        positions = torch.arange(start + first, start + first + piece.numel(), device=piece.device)
        factors = positions * _signed(_SPREAD) + _signed(key)
        total += int((bits * (factors | 1)).sum())
    return total % WORD


def _signed(value: int) -> int:
    """Return the int64 that equals `value` modulo 2^64."""
    value %= WORD
    return value - WORD if value >= WORD // 2 else value
