"""Evaluate a saved model on data that match its inputs."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.data.base import Data
from zerofit.data.chat_template import CHAT_TEMPLATE
from zerofit.data.labelled import refuse_unknown_classes
from zerofit.data.loader import default_workers, eval_batches, eval_indices
from zerofit.data.opening import default_data, open_data
from zerofit.data.tokenizer import has_tokenizer
from zerofit.infer.guards import failures, guarded
from zerofit.infer.limits import Device
from zerofit.infer.memory import activation_memory
from zerofit.infer.saved_model import SavedModel
from zerofit.models.build import empty_batch, extra_inputs, forward_logits, forward_named, output_part
from zerofit.models.catalog import ModelError
from zerofit.models.inputs import (
    ImageInputs,
    Inputs,
    LabelledTextInputs,
    NamedInputs,
    SegmentationInputs,
    TableInputs,
    TextInputs,
    are_packed,
    are_tokenized,
)
from zerofit.models.packing import refuse_unseparated
from zerofit.models.scores import (
    class_scores,
    class_table,
    compared,
    mean_iou,
    rouge_scores,
    squared_errors,
    tabled_classes,
    write_targets,
)
from zerofit.models.segmentation import are_dense
from zerofit.spec.errors import Problem, Problems, RunFailed, UserError, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, IGNORE_INDEX, Task, is_text
from zerofit.spec.run import Run

LONGEST_LOSS = 700.0  # exp() of a larger loss overflows
CHUNK_BYTES = 32 << 20  # bytes of logits that are converted to float32 at a time
TOP = 5


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Create a folder for temporary files in `parent`, and remove it afterwards.

    The default parent is the system's folder. Raises UserError if the folder cannot be created.
    """
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix="zerofit-", dir=parent)
    except OSError as error:
        message = f"cannot write to {parent or 'the folder for temporary files'}: {error.strerror or error}"
        problem = Problem(kind="unwritable", message=message, hint="name another folder", where="--offload-folder")
        raise UserError(problem) from None
    with folder as path:
        yield Path(path)


def open_eval_data(saved: SavedModel, fields: Mapping[str, Any], report: Reporter) -> Data:
    """Open the evaluation data: those of `fields`, or by default the training data.

    `fields`: options that the user has set, by their names in Run. Raises UserError with everything that does not match
    the model.
    """
    problems = Problems()
    if saved.task == "gan":
        hint = "look at the generated images: drawings.png in the run folder, and drawings/ with a file per epoch"
        problems.add("model-task", "a GAN cannot be evaluated: it predicts no labels", hint, "CKPT")
    if saved.info is None and "data" not in fields:
        message = f"{saved.folder} does not name its training data"
        problems.add("data-missing", message, f"name data, for example --data {default_data(saved.task)}", "--data")
    is_read = is_text(saved.task) and not fields.get("data", "").startswith("synthetic")
    tokenizer = problems.attempt(lambda: fields.get("tokenizer") or default_tokenizer(saved)) if is_read else None
    trained_len = saved.info and saved.info.seq_len
    seq_len = fields.get("seq_len") or trained_len or min(DEFAULT_SEQ_LEN, saved.longest or DEFAULT_SEQ_LEN)
    if saved.longest is not None and seq_len > saved.longest:
        message = f"{saved.folder} supports at most {saved.longest} tokens, not --seq-len {seq_len}"
        problems.add("seq-len", message, f"--seq-len {saved.longest} or less", "--seq-len")
    problems.raise_if_any()
    # Options that the user has not set are those of the training, so that the scores can be compared.
    same = ("data", "text_field", "pair_field", "label_field", "target_len", "seed", "packing", "stream")
    options = {name: getattr(saved.info, name) for name in same} if saved.info else {}
    if (saved.folder / CHAT_TEMPLATE).is_file():
        options["chat_template"] = saved.folder / CHAT_TEMPLATE
    if isinstance(saved.inputs, ImageInputs):
        options |= {"image_size": saved.inputs.size, "pretrained": saved.folder}
    options |= fields
    if tokenizer:
        options["tokenizer"] = tokenizer
    run = Run(**options)
    known = saved.inputs.classes if isinstance(saved.inputs, LabelledTextInputs) else ()
    data = open_data(run, saved.task, seq_len, report, known)
    refuse_unknown_classes(data.name, data.inputs, known)
    check_data(saved, data)
    return data


def check_data(saved: SavedModel, data: Data) -> None:
    """Raise UserError if the model lacks the data's classes, channels or token ids."""
    of_model, of_data, problems = saved.inputs, data.inputs, Problems()
    if type(of_model) is type(of_data) and isinstance(of_model, ImageInputs | TableInputs):
        for what in ("classes", "channels" if isinstance(of_model, ImageInputs) else "features"):
            model_count, data_count = getattr(of_model, what), getattr(of_data, what)
            if model_count != data_count:
                message = f"the model has {model_count} {what}, --data {data.name} has {data_count}"
                problems.add(what, message, "use data like the model's training data", "--data")
    elif (
        not isinstance(of_model, ImageInputs | TableInputs)
        and not isinstance(of_data, ImageInputs | TableInputs)
        and of_data.vocab_size > of_model.vocab_size
    ):
        problems.extend([too_many_ids(of_model, of_data.vocab_size)])
    problems.raise_if_any()


def too_many_ids(inputs: TextInputs | LabelledTextInputs | NamedInputs, ids: int) -> Problem:
    """Return the Problem to raise if a tokenizer has more ids than the model has embeddings."""
    message = f"the model has a vocabulary of {inputs.vocab_size} ids, the tokenizer has {ids}"
    hint = "set --tokenizer to the tokenizer of the model's training"
    return Problem(kind="vocabulary", message=message, hint=hint, where="--tokenizer")


def default_tokenizer(saved: SavedModel) -> str:
    """Return the tokenizer in the model's folder, else that of its training. Raises UserError."""
    if has_tokenizer(saved.folder):
        return str(saved.folder)
    if saved.info:
        return saved.info.tokenizer
    message, hint = f"{saved.folder} contains no tokenizer", "set --tokenizer to a FOLDER, or to bytes"
    raise UserError(Problem(kind="tokenizer", message=message, hint=hint, where="--tokenizer"))


@dataclass(frozen=True, kw_only=True)
class EvalSamples:
    """The validation samples to evaluate."""

    at_once: int  # samples in one forward
    limit: int | None = None  # None: all
    generated: int = 0  # number of samples for which an encoder-decoder generates text


@dataclass(frozen=True, kw_only=True)
class EvalScores:
    """A model's scores on its validation samples, and how fast they were evaluated."""

    loss: float
    accuracy: float | None  # None if there are no right answers; for segmentation the accuracy of pixels
    top5_accuracy: float | None  # of images with more than 5 classes
    mean_iou: float | None  # mean intersection over union, for segmentation
    perplexity: float | None  # of text
    macro_f1: float | None = None  # of classes
    micro_f1: float | None = None  # of tags other than O
    rouge1: float | None = None  # of generated texts
    rouge2: float | None = None
    rouge_l: float | None = None
    samples: int
    samples_per_s: float
    tokens_per_s: float | None  # of text


# The figures of a batch are one tensor, so that those of all batches can be added up:
#
#     summed loss | targets | right answers | right in the top 5 | table of true and predicted classes, row by row
@dataclass(frozen=True, kw_only=True)
class EvalFigures:
    """Computes the loss and the number of right answers of a batch."""

    task: Task
    dtype: torch.dtype  # type of image inputs
    own: bool = False  # a user's own model
    own_loss: bool = False  # whether its forward accepts labels and returns the loss
    loss: str | None = None  # "mse", or cross entropy
    inputs: Inputs | None = None  # of the model

    @property
    def classes(self) -> int:
        """The number of classes in the table of `class_table`; 0 if there is no table."""
        return tabled_classes(self.inputs)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Return float64 (4,): summed loss, targets, right answers, and right ones in the top five.

        `x`: token ids (batch, seq_len) or images (batch, channels, size, size); `extra`: the model's other inputs by
        name. Labels of -100 do not count. For labelled text and pixels, the table of `class_table` is appended.
        """
        if isinstance(self.inputs, NamedInputs):
            batch = {"inputs": x, "labels": labels, **extra}
            return cross_entropy_counts(forward_named(model, self.inputs, batch).logits, labels, 1)
        if self.own_loss:
            return self._own_mean(model, x, labels)
        logits, _ = forward_logits(model, x, **extra)
        logits = output_part(logits, "logits") if self.own else logits
        if self.loss == "mse":
            return squared_errors(logits, labels, 4)
        if are_dense(logits, labels):
            # One image at a time, since a copy of all logits with the classes last would double their memory.
            images = zip(logits.movedim(1, -1), labels, strict=True)
            counts = torch.stack([cross_entropy_counts(image, classes, 1) for image, classes in images]).sum(0)
        else:
            counts = cross_entropy_counts(logits, labels, TOP if self.task == "image" else 1)
        return torch.cat([counts, class_table(logits, labels, self.classes)]) if self.classes else counts

    def _own_mean(self, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        """Return the model's own mean loss times the samples, and their number, as float64 (4,)."""
        # zerofit's labels are shifted by one token, but such a model shifts its labels itself. So the labels are made
        # again from the inputs. Positions that do not count stay masked.
        if self.task == "causal-lm":  # as in transformers: labels have the positions of their tokens
            out = model(input_ids=x, labels=torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, x))
        else:
            out = model(x, labels=labels)
        # The model's own loss may be of any kind, so it is not known how many targets its mean is over.
        loss, count = output_part(out, "loss").double(), len(x)
        return torch.stack([loss * count, torch.full_like(loss, count), 0 * loss, 0 * loss])


def figures_of(saved: SavedModel, model: nn.Module, dtype: torch.dtype, inputs: Inputs | None = None) -> EvalFigures:
    """Return the EvalFigures for a model with weights of this type and for these inputs."""
    is_custom = saved.source.family == "custom"
    own_loss = is_custom and "labels" in inspect.signature(model.forward).parameters
    loss = saved.info.loss if saved.info else None
    return EvalFigures(task=saved.task, dtype=dtype, own=is_custom, own_loss=own_loss, loss=loss, inputs=inputs)


# Logits of a vocabulary of 128,000 in float32 take 512 kB a token. In chunks, the loss needs 32 MiB at a time.
def cross_entropy_counts(logits: Tensor, labels: Tensor, top: int) -> Tensor:
    """Return EvalFigures' float64 (4,) for logits (..., classes) and labels (...)."""
    flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    rows = max(1, CHUNK_BYTES // (4 * flat.shape[-1]))
    # float32 has all integers only up to 2**24. A validation set of texts can have more targets.
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


@torch.no_grad()
def evaluate(
    model: nn.Module, figures: EvalFigures, data: Data, samples: EvalSamples, device: torch.device, report: Reporter
) -> EvalScores:
    """Evaluate the model on validation samples.

    Raises RunFailed if memory runs out, or if the loss is not finite.
    """
    count, at_once = len(eval_indices(len(data.valid), samples.limit)), samples.at_once
    # 0 and 1 are the rank and the number of ranks: one process evaluates all samples.
    batches = eval_batches(data.valid, 0, 1, at_once, samples.limit, default_workers(data, 1))
    start = time.perf_counter()
    with (
        report.task(f"evaluating {data.name}", count, "samples") as task,
        failures("a smaller --micro-batch"),
        guarded(model),
    ):
        total = torch.zeros(4 + figures.classes**2, dtype=torch.float64)
        for batch in batches:
            real = int(batch["real"].sum())  # the last batch is filled with samples that were already evaluated
            x, labels = batch["inputs"][:real], batch["labels"][:real]
            x = x.to(device, figures.dtype) if x.is_floating_point() else x.to(device)
            extra = {name: t[:real].to(device) for name, t in extra_inputs(data.inputs, batch).items()}
            total += figures(model, x, labels.to(device), extra).cpu()
            task.advance(real)
        seconds = time.perf_counter() - start
        has_targets = isinstance(data.inputs, NamedInputs) and data.inputs.padded
        generated = min(samples.generated, count) if has_targets else 0
        rouge = _rouge(model, data, at_once, generated, device) if generated else {}
    return _scores(total.tolist(), figures, data.inputs, count, seconds, rouge)


def _rouge(model: nn.Module, data: Data, micro: int, count: int, device: torch.device) -> dict[str, float]:
    """Return the ROUGE scores of the texts that the model generates for `count` samples."""
    assert isinstance(data.inputs, NamedInputs)
    pairs, length = [], data.inputs.tensors[-1].shape[0]
    for batch in eval_batches(data.valid, 0, 1, micro, count):
        fed = {name: batch[name].to(device) for name in ("inputs", "attention_mask")}
        pairs += compared(write_targets(model, fed, length, data.end_id), batch["labels"], batch["real"], data)
    return rouge_scores(pairs)


# Measured by running the evaluation's code on fake tensors: formulas per architecture would become outdated.
def working_bytes(
    model: nn.Module, figures: EvalFigures, inputs: Inputs, micro: int, device: Device, whose: str
) -> int:
    """Return the bytes that evaluating `micro` samples needs besides the weights; 0 if unknown.

    Raises UserError if the model does not support such samples.
    """

    def call(fake: nn.Module, on: torch.device) -> None:
        with on:
            batch = empty_batch(inputs, micro)
        x = batch["inputs"]
        x = x.to(figures.dtype) if x.is_floating_point() else x
        with refuse_unseparated(fake, whose) if are_packed(inputs) else nullcontext():
            figures(fake, x, batch["labels"], extra_inputs(inputs, batch))

    try:
        return activation_memory(model, torch.device("cpu" if device == "cpu" else "cuda"), call).peak
    except ModelError as error:
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where="--packing")) from None
    except Exception as error:  # any error, for an unsupported shape or values that fakes lack
        if figures.own:
            return 0
        if isinstance(inputs, ImageInputs):
            got, knob = f"images of {inputs.size} pixels", "--image-size"
        elif isinstance(inputs, TableInputs):
            got, knob = f"rows of {inputs.features} features", "--data"
        else:
            got, knob = f"sequences of {inputs.seq_len} tokens", "--seq-len"
        message = f"{whose} does not support {got}: {reason_of(error)}"
        raise UserError(Problem(kind="model-shape", message=message, hint=knob, where=knob)) from error


def _scores(
    sums: list[float], figures: EvalFigures, inputs: Inputs, samples: int, seconds: float, rouge: dict[str, float]
) -> EvalScores:
    """Return the scores of summed figures. Raises RunFailed if the loss is not finite."""
    total, targets, right, right_in_top, *table = sums
    loss = total / max(targets, 1.0)
    if not math.isfinite(loss):
        hint = "use --dtype fp32 if fp16 overflows; otherwise the weights themselves are not finite"
        raise RunFailed(Problem(kind="nan-loss", message=f"the loss is {loss}", hint=hint, where="CKPT"))
    answers = not figures.own_loss and figures.loss != "mse"  # answers can be right or wrong
    samples_per_s = samples / max(seconds, 1e-9)
    scores = dict(rouge)
    if isinstance(inputs, LabelledTextInputs):
        scores |= class_scores(table, inputs.classes, inputs.tags)
    if answers:
        scores.setdefault("accuracy", right / max(targets, 1.0))
    ranked = figures.task == "image" and isinstance(inputs, ImageInputs) and inputs.classes > TOP
    writes = are_tokenized(inputs) and not isinstance(inputs, LabelledTextInputs)
    return EvalScores(
        **{"accuracy": None, **scores},
        loss=loss,
        top5_accuracy=right_in_top / max(targets, 1.0) if answers and ranked else None,
        mean_iou=mean_iou(table) if isinstance(inputs, SegmentationInputs) else None,
        perplexity=math.exp(min(loss, LONGEST_LOSS)) if writes else None,
        samples=samples,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * getattr(inputs, "seq_len", 0) if are_tokenized(inputs) else None,
    )
