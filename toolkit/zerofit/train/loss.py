"""Compute cross entropies, weighted so that all layouts average over the same targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.models.segmentation import are_dense, mean_of_images
from zerofit.spec.model_facts import IGNORE_INDEX, PLAIN_HEAD_TYPES


def weighted_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | float, chunk: int | None = None, smoothing: float = 0.0
) -> Tensor:
    """Return weight x the sum of cross entropies of logits (..., classes) and labels (...).

    The result is one float32 number. Float labels are probabilities (..., classes), as for mixed images. If each pixel
    has a class, each image counts as one target (see `mean_of_images`). `smoothing`: torch's label_smoothing. With
    `chunk`, the logits of only that many targets are in float32 at a time. If ranks have different micro batches, the
    weight must be a tensor.
    """
    # Let weight = accumulation steps x (data x sequence parallel degree) / targets in the global batch. Then the
    # engine's mean over micro batches and ranks is exactly the mean over all targets, on whichever ranks they are.
    if chunk is not None:
        return _Chunked.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), chunk) * weight
    if are_dense(logits, labels):
        return mean_of_images(logits, labels, smoothing) * weight
    flat = logits.reshape(-1, logits.shape[-1]).float()  # (targets, classes)
    if labels.is_floating_point():
        return functional.cross_entropy(flat, labels, reduction="sum", label_smoothing=smoothing) * weight
    if smoothing:
        options = {"ignore_index": IGNORE_INDEX, "label_smoothing": smoothing}
        return functional.cross_entropy(flat, labels.reshape(-1), reduction="sum", **options) * weight
    # with this weight and equal micro batches no position is ignored, so the mean saves a kernel
    if isinstance(weight, float) and weight * labels.numel() == 1:
        return functional.cross_entropy(flat, labels.reshape(-1))
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum") * weight


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Return the sum of cross entropies, float32, from hidden states without all logits.

    The logits are hidden (..., width) times a head's weight (classes, width). Only the logits of `chunk` targets exist
    at a time. The shape of `labels` is (...).
    """
    return _FromHidden.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), chunk)


# Both classes below split (targets, classes) logits into chunks of targets, because float32 logits of a long sequence
# and a large vocabulary are the largest tensor of a step. For each chunk, with p = softmax(logits) in float32:
#
#     loss     = -sum over targets of log p[label]
#     gradient = p - onehot(label), and 0 for ignored targets
#
# The gradient is computed in forward, while the chunk's p exists, so backward only multiplies by the incoming scale.
class _FromHidden(torch.autograd.Function):
    """Sum of cross entropies from hidden states and a head, with gradients for both.

    No matmul is computed twice, and backward does not need the weight. The head's gradient is summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        wanted = wants_hidden or wants_weight
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in chunk_starts(len(labels), chunk):
            part = slice(start, start + chunk)
            # no name for the logits here: they must be freed before the products below
            loss, gradient = _with_gradient(functional.linear(hidden[part], weight), labels[part], wanted)
            total += loss
            if of_hidden is not None:
                of_hidden[part] = gradient @ weight
            if of_weight is not None and gradient.dtype == hidden.dtype == of_weight.dtype:
                of_weight.addmm_(gradient.t(), hidden[part])
            elif of_weight is not None:
                of_weight += gradient.t() @ hidden[part]
            del gradient  # must be freed before the next chunk's logits
        ctx.gradients, ctx.dtype = (of_hidden, of_weight), weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        of_hidden = None if of_hidden is None else of_hidden.mul_(scale)
        return of_hidden, None if of_weight is None else of_weight.mul_(scale).to(ctx.dtype), None, None


class _Chunked(torch.autograd.Function):
    """Sum of cross entropies from logits, with a gradient in the logits' precision."""

    # This keeps one extra tensor of the logits' size. Plain cross entropy keeps two (a float32 copy and
    # log-probabilities) and allocates two more in backward. Plain cross entropy rounds the gradient to the logits'
    # precision once; this class rounds it twice, in forward and in backward.
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:  # (targets, classes), (targets,)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = logits.new_zeros((), dtype=torch.float32)
        for start in chunk_starts(len(labels), chunk):
            part = slice(start, start + chunk)
            loss, of_logits = _with_gradient(logits[part], labels[part], gradient is not None)
            total += loss
            if gradient is not None:
                gradient[part] = of_logits
            del of_logits  # must be freed before the next chunk's softmax
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scale), None, None


def chunk_starts(targets: int, chunk: int) -> Iterable[int]:
    """Return the first index of each chunk of targets."""
    return range(0, targets, chunk)


def _with_gradient(logits: Tensor, labels: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of cross entropies, float32, and, if `wanted`, its gradient for the logits."""
    log_p = functional.log_softmax(logits.float(), dim=-1)
    loss = functional.nll_loss(log_p, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    if not wanted:
        return loss, logits
    real = (labels != IGNORE_INDEX).unsqueeze(1)
    p = log_p.exp_()  # in place: the largest tensor of a step
    p.scatter_add_(1, labels.clamp_min(0).unsqueeze(1), p.new_full((len(p), 1), -1.0))
    return loss, p.mul_(real).to(logits.dtype)


def counts(logits: Tensor, labels: Tensor) -> Tensor:
    """Return sum of cross entropies, number of targets, number of right answers: float64 (3,)."""
    if are_dense(logits, labels):
        return counts(logits.movedim(1, -1).flatten(0, 2), labels.flatten())
    flat, labels = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    real = labels != IGNORE_INDEX
    total = functional.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    right = (flat.argmax(-1) == labels) & real
    return torch.stack([total.double(), real.sum().double(), right.sum().double()])


# Instead of hidden -> head -> logits (targets, classes) -> loss, the head itself computes the loss chunk by chunk. The
# head must stay the module that DeepSpeed hooks, because ZeRO-3 gathers a weight when its module's forward is called.
class HeadLoss:
    """Computes the loss from hidden states or, if gradients are disabled, `counts`."""

    def __init__(self, head: nn.Linear, chunk: int):
        self._head, self._chunk = head, chunk
        self._labels: Tensor | None = None

    def of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of hidden states (..., width) or, without gradients, their `counts`."""
        if torch.is_grad_enabled():
            return linear_cross_entropy(hidden, self._head.weight, labels, self._chunk)
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        parts = zip(hidden.split(self._chunk), labels.split(self._chunk), strict=True)
        return torch.stack([counts(functional.linear(h, self._head.weight), t) for h, t in parts]).sum(dim=0)

    @contextmanager
    def with_labels(self, labels: Tensor) -> Iterator[None]:
        """Inside this context, the head's forwards use these labels."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Inside `with_labels`, return the result of `of`. Otherwise return logits."""
        if self._labels is None:
            return functional.linear(hidden, self._head.weight)
        return self.of(hidden, self._labels)


def head_loss(model: Any, chunk: int | None, *, inside: bool) -> HeadLoss | None:
    """Replace the head of a transformers model and return the object that computes the loss.

    `inside`: the head's own forward computes the loss. Otherwise the head returns hidden states. Returns None without a
    chunk, or if the logits are not the product of the hidden states and one matrix that this rank has in full.
    """
    if chunk is None or getattr(getattr(model, "config", None), "model_type", None) not in PLAIN_HEAD_TYPES:
        return None
    head = model.get_output_embeddings()
    # The chunked loss multiplies by the matrix itself. A subclass may compute more, such as adapters or a split
    # vocabulary.
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    loss = HeadLoss(head, chunk)
    vars(head)["forward"] = loss.forward if inside else lambda hidden: hidden
    return loss
