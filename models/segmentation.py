"""Compute the loss of models that classify each pixel.

Logits are (batch, classes, height, width), labels (batch, height, width).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from zerofit.spec.model_facts import IGNORE_INDEX


def are_dense(logits: Tensor, labels: Tensor) -> bool:
    """Return whether logits and labels are per pixel."""
    return logits.dim() == 4 and labels.dim() == 3


def mean_of_images(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the sum of all images' losses, float32.

    An image's loss is the mean cross entropy over its labelled pixels. Each image has the same weight, so the loss does
    not depend on the layout.
    """
    options = {"ignore_index": IGNORE_INDEX, "reduction": "none", "label_smoothing": smoothing}
    pixels = functional.cross_entropy(logits.float(), labels, **options)
    # For an image without labels the loss is then 0, and not 0 / 0.
    labelled = (labels != IGNORE_INDEX).sum((1, 2)).clamp_min(1)
    return (pixels.sum((1, 2)) / labelled).sum()
