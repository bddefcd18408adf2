"""Figures of models that give each pixel a class.

Logits are (batch, classes, height, width), labels (batch, height, width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from zerofit.models.inputs import Inputs, SegmentationInputs
from zerofit.spec.model_facts import IGNORE_INDEX


def are_dense(logits: Tensor, labels: Tensor) -> bool:
    """Return whether there is a class for each pixel."""
    return logits.dim() == 4 and labels.dim() == 3


def figures_count(inputs: Inputs | None) -> int:
    """Return how many numbers `confusion` gives for these inputs; 0 for other ones."""
    return inputs.classes**2 if isinstance(inputs, SegmentationInputs) else 0


def mean_of_images(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the sum over images of their mean cross entropies over labelled pixels, float32.

    An image's weight does not depend on how many pixels of other images are labelled, so that the loss is the same in
    any layout.
    """
    how = {"ignore_index": IGNORE_INDEX, "reduction": "none", "label_smoothing": smoothing}
    pixels = functional.cross_entropy(logits.float(), labels, **how)
    labelled = (labels != IGNORE_INDEX).sum((1, 2)).clamp_min(1)
    return (pixels.sum((1, 2)) / labelled).sum()


def confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """Return float64 (classes x classes,): pixels by their class and the class with the largest logit, row by row.

    Ignored pixels count nowhere. It has one shape whatever the values, so that it can be simulated.
    """
    classes, real = logits.shape[1], labels != IGNORE_INDEX
    cells = torch.where(real, labels * classes + logits.argmax(1), 0).reshape(-1)
    counts = torch.zeros(classes**2, dtype=torch.float64, device=logits.device)
    return counts.scatter_add_(0, cells, real.reshape(-1).double())


def mean_iou(counts: Sequence[float]) -> float:
    """Return the mean intersection over union of the classes that occur, in labels or in answers."""
    classes = math.isqrt(len(counts))
    table = torch.tensor(counts, dtype=torch.float64).view(classes, classes)
    both, either = table.diag(), table.sum(0) + table.sum(1) - table.diag()
    return float((both / either)[either > 0].mean()) if bool((either > 0).any()) else 0.0
