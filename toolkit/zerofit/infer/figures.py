"""Figures of a batch in an evaluation: loss and right answers, as the training engine's evaluation counts them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.infer.saved_model import SavedModel
from zerofit.models.build import forward_logits, output_part
from zerofit.spec.task import IGNORE_INDEX, Task

CHUNK_BYTES = 32 << 20  # of float32 logits at a time, beside the logits themselves
TOP = 5


@dataclass(frozen=True, kw_only=True)
class EvalFigures:
    """How a batch's outputs are judged."""

    task: Task
    dtype: torch.dtype  # of the numbers that images are given in
    own: bool = False  # a user's own model
    own_loss: bool = False  # its forward takes labels and gives its loss
    loss: str | None = None  # "mse", or cross entropy

    @property
    def counts_answers(self) -> bool:
        """Whether there are right and wrong answers."""
        return not self.own_loss and self.loss != "mse"

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        """Return float64 (4,): summed loss, targets, right answers, right ones among the five likeliest (images).

        Token ids (batch, seq_len) or images (batch, channels, size, size); labels of -100 do not count.
        """
        if self.own_loss:
            return self._own_mean(model, x, labels)
        logits, _ = forward_logits(model, x)
        logits = output_part(logits, "logits") if self.own else logits
        if self.loss == "mse":
            return _squared_errors(logits, labels)
        return cross_entropy_counts(logits, labels, TOP if self.task == "image" else 1)

    def _own_mean(self, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        """Return the model's own mean loss, weighted by the samples."""
        if self.task == "causal-lm":  # as transformers has it: labels stand where their tokens do
            out = model(input_ids=x, labels=torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, x))
        else:
            out = model(x, labels=labels)
        loss, count = output_part(out, "loss").double(), len(x)
        return torch.stack([loss * count, torch.full_like(loss, count), 0 * loss, 0 * loss])


def figures_of(saved: SavedModel, model: nn.Module, dtype: torch.dtype) -> EvalFigures:
    """Return how this model is judged, its weights being of this type."""
    own_loss = saved.own and "labels" in inspect.signature(model.forward).parameters
    loss = saved.info.loss if saved.info else None
    return EvalFigures(task=saved.task, dtype=dtype, own=saved.own, own_loss=own_loss, loss=loss)


def cross_entropy_counts(logits: Tensor, labels: Tensor, top: int) -> Tensor:
    """Return float64 (4,) as EvalFigures does, of logits (..., classes) and labels (...), piece by piece in float32."""
    flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    rows = max(1, CHUNK_BYTES // (4 * flat.shape[-1]))
    total = torch.zeros(4, dtype=torch.float64, device=flat.device)
    for start in range(0, len(flat), rows):
        piece, wanted = flat[start : start + rows].float(), labels[start : start + rows]
        real = wanted != IGNORE_INDEX
        loss = functional.cross_entropy(piece, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
        best = piece.topk(min(top, piece.shape[-1]), dim=-1).indices if top > 1 else piece.argmax(-1, keepdim=True)
        right = (best == wanted.unsqueeze(1)) & real.unsqueeze(1)  # (targets, top)
        counted = (loss, real.sum(), right[:, 0].sum(), right.sum())
        total += torch.stack([part.double() for part in counted])
    return total


def _squared_errors(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.numel() != labels.numel():
        message = f"--loss mse needs one output a sample: got {tuple(outputs.shape)} for labels {tuple(labels.shape)}"
        raise ValueError(message)
    real = labels.reshape(-1) != IGNORE_INDEX
    errors = (outputs.float().reshape(labels.shape) - labels.float()).reshape(-1)[real].double().square()
    return torch.stack([errors.sum(), real.sum().double(), errors.sum() * 0, errors.sum() * 0])
