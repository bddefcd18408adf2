"""Evaluation over validation samples: loss, accuracy, perplexity, as the training engine's evaluation has them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerofit.data import Data, default_workers, eval_batches, eval_indices
from zerofit.infer.activation_memory import activation_memory
from zerofit.infer.failures import failures, guarded
from zerofit.infer.figures import EvalFigures
from zerofit.infer.limits import Device
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.spec.errors import Problem, RunFailed, UserError
from zerofit.spec.events import Reporter

LONGEST_LOSS = 700.0  # exp() of more overflows


@dataclass(frozen=True, kw_only=True)
class EvalScores:
    """How good a model is on its validation samples, and how fast they were evaluated."""

    loss: float
    accuracy: float | None  # None where nothing is right or wrong
    top5_accuracy: float | None  # of images
    perplexity: float | None  # of text
    samples: int
    samples_per_s: float
    tokens_per_s: float | None  # of text


@torch.no_grad()
def evaluate(
    model: nn.Module,
    figures: EvalFigures,
    data: Data,
    micro: int,
    limit: int | None,
    device: torch.device,
    report: Reporter,
) -> EvalScores:
    """Evaluate the model over all validation samples, or `limit` of them, `micro` at a time.

    Raises RunFailed out of memory, and where the loss is not finite.
    """
    count = len(eval_indices(len(data.valid), limit))
    batches = eval_batches(data.valid, 0, 1, micro, limit, default_workers(data, 1))
    start = time.perf_counter()
    with (
        report.task(f"evaluating {data.name}", count, "samples") as task,
        failures("a smaller --micro-batch"),
        guarded(model),
    ):
        total = torch.zeros(4, dtype=torch.float64)
        for batch in batches:
            real = int(batch["real"].sum())  # the last batch is filled up with samples seen before
            total += _counts(model, figures, batch["inputs"][:real], batch["labels"][:real], device)
            task.advance(real)
    return _scores(total.tolist(), figures, data.inputs, count, time.perf_counter() - start)


def working_bytes(
    model: nn.Module, figures: EvalFigures, inputs: Inputs, micro: int, device: Device, whose: str
) -> int:
    """Return bytes that evaluating `micro` samples takes beside the weights; 0 where it cannot be known.

    Raises UserError where the model cannot take such samples.
    """

    def call(fake: nn.Module, on: torch.device) -> None:
        x, labels = _example(inputs, micro, figures.dtype, on)
        figures(fake, x, labels)

    try:
        return activation_memory(model, torch.device("cpu" if device == "cpu" else "cuda"), call).peak
    except Exception as error:  # what a forward raises on a shape that it cannot take, or on values that are not there
        if figures.own:
            return 0
        image = isinstance(inputs, ImageInputs)
        got = f"images of {inputs.size} pixels" if image else f"sequences of {inputs.seq_len} tokens"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        knob = "--image-size" if image else "--seq-len"
        problem = Problem(kind="model-shape", message=f"{whose} cannot take {got}: {reason}", hint=knob, where=knob)
        raise UserError(problem) from error


def _counts(model: nn.Module, figures: EvalFigures, x: Tensor, labels: Tensor, device: torch.device) -> Tensor:
    x = x.to(device, figures.dtype) if x.is_floating_point() else x.to(device)
    return figures(model, x, labels.to(device)).cpu()


def _example(inputs: Inputs, micro: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    if isinstance(inputs, ImageInputs):
        x = torch.zeros(micro, inputs.channels, inputs.size, inputs.size, dtype=dtype, device=device)
        return x, torch.zeros(micro, dtype=torch.long, device=device)
    x = torch.zeros(micro, inputs.seq_len, dtype=torch.long, device=device)
    return x, torch.zeros_like(x)


def _scores(sums: list[float], figures: EvalFigures, inputs: Inputs, samples: int, seconds: float) -> EvalScores:
    total, targets, right, near = sums
    loss = total / max(targets, 1.0)
    if not math.isfinite(loss):
        hint = "--dtype fp32, where fp16 overflows; else the weights themselves are not finite"
        raise RunFailed(Problem(kind="nan-loss", message=f"the loss is {loss}", hint=hint, where="CKPT"))
    answers = figures.counts_answers
    samples_per_s = samples / max(seconds, 1e-9)
    return EvalScores(
        loss=loss,
        accuracy=right / max(targets, 1.0) if answers else None,
        top5_accuracy=near / max(targets, 1.0) if answers and isinstance(inputs, ImageInputs) else None,
        perplexity=None if isinstance(inputs, ImageInputs) else math.exp(min(loss, LONGEST_LOSS)),
        samples=samples,
        samples_per_s=samples_per_s,
        tokens_per_s=None if isinstance(inputs, ImageInputs) else samples_per_s * inputs.seq_len,
    )
