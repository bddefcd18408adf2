"""A language model's head that returns the loss instead of logits, so few logits exist at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.spec.model_facts import PLAIN_HEAD_TYPES
from zerofit.train.loss import counts, linear_cross_entropy


# Instead of hidden -> head -> logits (targets, classes) -> loss, the head itself computes the loss chunk by chunk. It
# must still be the module that DeepSpeed hooks: ZeRO-3 gathers a weight when its module's forward is called.
class HeadLoss:
    """Loss of targets computed directly from hidden states; without gradients their counts (see `counts`)."""

    def __init__(self, head: nn.Linear, chunk: int):
        self._head, self._chunk = head, chunk
        self._labels: Tensor | None = None

    def of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of cross entropies of hidden states (..., width), or float64 (3,) without gradients."""
        if torch.is_grad_enabled():
            return linear_cross_entropy(hidden, self._head.weight, labels, self._chunk)
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        parts = zip(hidden.split(self._chunk), labels.split(self._chunk), strict=True)
        return torch.stack([counts(functional.linear(h, self._head.weight), t) for h, t in parts]).sum(dim=0)

    @contextmanager
    def with_labels(self, labels: Tensor) -> Iterator[None]:
        """Give the head these labels for the forwards inside the context."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `of` the hidden states inside `with_labels`, else logits."""
        if self._labels is None:
            return functional.linear(hidden, self._head.weight)
        return self.of(hidden, self._labels)


def head_loss(model: Any, chunk: int | None, *, inside: bool) -> HeadLoss | None:
    """Replace the head of a transformers model and return the object that computes the loss.

    `inside`: the head's own forward computes it, for which ZeRO-3 gathers the head; else the head returns hidden
    states. Returns None without a chunk, or if the logits are not one product with a matrix that is complete on this
    rank.
    """
    if chunk is None or getattr(getattr(model, "config", None), "model_type", None) not in PLAIN_HEAD_TYPES:
        return None
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    found = HeadLoss(head, chunk)
    vars(head)["forward"] = found.forward if inside else lambda hidden: hidden
    return found
