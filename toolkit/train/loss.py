"""The loss: cross entropy weighted so that every layout averages over the very same targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100  # label of a position that does not count


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | float) -> Tensor:
    """weight x the sum of cross entropies over targets; logits (..., classes), labels (...), in float32.

    With weight = accumulation steps x (data x sequence parallel degree) / targets in the global batch, the engine's
    mean over micro batches and ranks is exactly the mean over all targets, however they are spread.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()  # (targets, classes)
    if isinstance(weight, float) and weight * labels.numel() == 1:  # no position is ignored: the mean, a kernel less
        return functional.cross_entropy(flat, labels.reshape(-1))
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE, reduction="sum") * weight


def counts(logits: Tensor, labels: Tensor) -> Tensor:
    """float64 (3,): sum of cross entropies, targets, targets whose largest logit is right."""
    flat, labels = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    real = labels != IGNORE
    total = functional.cross_entropy(flat, labels, ignore_index=IGNORE, reduction="sum")
    right = (flat.argmax(-1) == labels) & real
    return torch.stack([total.double(), real.sum().double(), right.sum().double()])


def part_of(output: Any, name: str) -> Tensor:
    """The "loss" or "logits" in what a user's model gave: an attribute, a key, the first of a tuple, or all of it."""
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if hasattr(output, name):
        return getattr(output, name)
    return output[0] if isinstance(output, tuple | list) else output
