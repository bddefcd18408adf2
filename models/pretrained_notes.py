"""Write notes for the user about how a pretrained model's weights are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from zerofit.models.build import build
from zerofit.models.catalog import PRETRAINED, ModelSource
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.models.presets import ModelArgs
from zerofit.models.pretrained import match, open_weights


def notes_of_pretrained(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> list[str]:
    """Return notes about a random head and about unused weights. Raises ModelError."""
    if source.pretrained:
        source = replace(source, partial=None)  # for the names in the file
        with torch.device("meta"):
            model = build(source, inputs, args)
        weights = open_weights(Path(source.pretrained))
        matched = match(model, source, inputs, weights)
        notes = _drawn(matched.head, matched.head_classes, str(weights.path), inputs)
        if matched.left_out:
            notes.append(f"{weights.path} has auxiliary heads that are not used: {', '.join(matched.left_out)}")
        return notes
    classes = drawn_head(source, inputs)
    return _drawn("its last layer", classes, str(source.path), inputs) if classes is not None else []


def _drawn(head: str | None, classes: int, where: str, inputs: Inputs | None) -> list[str]:
    if head is None or not isinstance(inputs, ImageInputs):
        return []
    return [f"the head ({head}) is initialized at random: {where} has {classes} classes, the data has {inputs.classes}"]


def drawn_head(source: ModelSource, inputs: Inputs | None) -> int | None:
    """Return a pretrained image classifier's number of classes if the data has another one."""
    if source.origin != PRETRAINED or source.task != "image" or not isinstance(inputs, ImageInputs):
        return None
    classes = make_config(source, None, {}).num_labels
    return classes if classes != inputs.classes else None
