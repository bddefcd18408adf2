"""Compute scores: accuracy and F1 (scikit-learn), mean IoU, and ROUGE (rouge-score)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zerofit.models.inputs import Inputs, LabelledTextInputs, SegmentationInputs
from zerofit.models.segmentation import are_dense
from zerofit.spec.model_facts import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OUTSIDE = "O"  # the tag of words outside any entity
ROUGE = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}  # the library's names, and ours


def tabled_classes(inputs: Inputs | None) -> int:
    """Return the number of classes in these inputs' `class_table`; 0 without a table."""
    if isinstance(inputs, SegmentationInputs):
        return inputs.classes
    return len(inputs.classes) if isinstance(inputs, LabelledTextInputs) else 0


def class_table(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return a confusion matrix, float64 (classes * classes,).

    It counts labels i predicted as j, without labels of -100. Its shape does not depend on values, so it can be
    simulated. If each pixel has a label, dimension 1 of the logits is the class.
    """
    spread = logits.movedim(1, -1) if are_dense(logits, labels) else logits
    best, labels = spread[..., :classes].float().argmax(-1).reshape(-1), labels.reshape(-1)
    real = labels != IGNORE_INDEX
    # An ignored label of -100 would be a negative index. It adds 0 to the first cell instead.
    cells = torch.where(real, labels * classes + best, 0)
    return torch.zeros(classes**2, dtype=torch.float64, device=labels.device).scatter_add_(0, cells, real.double())


def class_scores(table: Sequence[float], classes: Sequence[str], tags: bool) -> dict[str, float]:
    """Return accuracy, macro F1 and, with `tags`, the micro F1 of all tags except O."""
    from sklearn.metrics import accuracy_score, f1_score

    counted = np.asarray(table).reshape(len(classes), len(classes))
    true, predicted = np.nonzero(counted)
    weights = counted[true, predicted]  # one weighted sample for each cell that is not 0
    if not len(weights):
        return {"accuracy": 0.0, "macro_f1": 0.0}
    f1 = partial(f1_score, true, predicted, sample_weight=weights, zero_division=0.0)  # pyright: ignore[reportArgumentType] - a float is allowed
    scores = {
        "accuracy": float(accuracy_score(true, predicted, sample_weight=weights)),
        "macro_f1": float(f1(average="macro")),
    }
    if tags and OUTSIDE in classes:
        # Most words are outside of entities. Over all tags, the micro F1 would be equal to the accuracy.
        entities = [index for index, name in enumerate(classes) if name != OUTSIDE]
        scores["micro_f1"] = float(f1(labels=entities, average="micro"))
    return scores


def one_a_sample(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return outputs as float32, in the labels' shape.

    Raises ValueError if there is not one output per label.
    """
    if outputs.numel() != labels.numel():
        message = f"--loss mse needs one output per sample: got {tuple(outputs.shape)} for labels {tuple(labels.shape)}"
        raise ValueError(message)
    return outputs.float().reshape(labels.shape)


def squared_errors(outputs: Tensor, labels: Tensor, figures: int) -> Tensor:
    """Return the sum of squared errors and the number of targets, then zeros: float64 (figures,)."""
    real = labels.reshape(-1) != IGNORE_INDEX
    errors = (one_a_sample(outputs, labels) - labels.float()).reshape(-1)[real].double().square()
    return torch.stack([errors.sum(), real.sum().double(), *[errors.sum() * 0] * (figures - 2)])


def mean_iou(counts: Sequence[float]) -> float:
    """Return the mean intersection over union, over classes in labels or predictions."""
    classes = math.isqrt(len(counts))
    table = torch.tensor(counts, dtype=torch.float64).view(classes, classes)
    both, either = table.diag(), table.sum(0) + table.sum(1) - table.diag()
    return float((both / either)[either > 0].mean()) if bool((either > 0).any()) else 0.0


def rouge_scores(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the mean F measures of ROUGE-1, -2 and -L over (reference, generated text)."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(reference, written) for reference, written in pairs]
    return {key: sum(score[name].fmeasure for score in scores) / max(len(scores), 1) for name, key in ROUGE.items()}


def takes_cache(config: PreTrainedConfig) -> bool:
    """Return whether transformers' cache has enough layers for the decoder.

    The cache has `num_hidden_layers` layers. In T5's config, this key counts the layers of the encoder.
    """
    return (getattr(config, "num_decoder_layers", None) or 0) <= config.get_text_config(decoder=True).num_hidden_layers


@torch.no_grad()
def write_targets(
    model: nn.Module, batch: Mapping[str, Tensor], most: int, end_id: int | None, together: bool = False
) -> Tensor:
    """Generate text greedily with an encoder-decoder.

    It has at most `most` tokens for each source of a batch. Returns int64 (batch, tokens) without the start token.
    `together`: whether all ranks must run the same number of forwards.
    """
    from transformers import GenerationConfig

    transformer: Any = model  # a PreTrainedModel and a GenerationMixin
    config = transformer.config
    end_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({end_id} if end_id is not None else {token for token in end_ids if token is not None})
    tokens = transformer.generate(
        input_ids=batch["inputs"],
        attention_mask=batch["attention_mask"],
        generation_config=GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
            eos_token_id=ends,
            pad_token_id=ends[0],
            decoder_start_token_id=config.decoder_start_token_id,
            use_cache=takes_cache(config),
        ),
        # At ZeRO 3 each forward needs all ranks. Ranks with short texts would end early and block the others.
        synced_gpus=together,
    )
    return tokens[:, 1:]


def compared(written: Tensor, labels: Tensor, real: Sequence[bool], data: Any) -> list[tuple[str, str]]:
    """Return (reference, generated text) of real samples, decoded by a zerofit.data.base.Data."""
    pairs = []
    for ids, label_ids, is_real in zip(written.tolist(), labels.tolist(), real, strict=True):
        if is_real:
            ids = ids[: ids.index(data.end_id)] if data.end_id in ids else ids
            reference = [token for token in label_ids if token not in (IGNORE_INDEX, data.end_id)]
            pairs.append((data.decode(reference), data.decode(ids)))
    return pairs
