"""Write notes for the user about how a pretrained model's weights are used."""

from __future__ import annotations

from dataclasses import replace

import torch

from zerofit.models.build import build
from zerofit.models.catalog import PRETRAINED, ModelSource
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.models.presets import ModelArgs
from zerofit.models.pretrained import drawn_anew, notes_on


def notes_of_pretrained(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> list[str]:
    """Return notes about a random head and about unused weights. Raises ModelError."""
    if source.pretrained:
        source = replace(source, partial=None)  # for the names in the file
        with torch.device("meta"):
            model = build(source, inputs, args)
        return notes_on(model, source, inputs)
    classes = drawn_head(source, inputs)
    if classes is None or not isinstance(inputs, ImageInputs):
        return []
    return [drawn_anew("its last layer", classes, str(source.path), inputs)]


def drawn_head(source: ModelSource, inputs: Inputs | None) -> int | None:
    """Return a pretrained image classifier's number of classes if the data has another one."""
    if source.origin != PRETRAINED or source.task != "image" or not isinstance(inputs, ImageInputs):
        return None
    classes = make_config(source, None, {}).num_labels
    return classes if classes != inputs.classes else None
