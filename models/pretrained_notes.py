"""What a user should know of how a pretrained model's weights are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zerofit.models.build import build
from zerofit.models.catalog import PRETRAINED, ModelSource
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import ImageInputs, Inputs
from zerofit.models.pretrained import drawn_anew, notes_on


def notes_of_pretrained(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]) -> list[str]:
    """Return sentences on a head that is drawn anew and on what is left out. Raises ModelError."""
    if source.pretrained:
        source = replace(source, partial=None)  # whose names are the file's
        with torch.device("meta"):
            model = build(source, inputs, args)
        return notes_on(model, source, inputs)
    classes = drawn_head(source, inputs)
    if classes is None or not isinstance(inputs, ImageInputs):
        return []
    return [drawn_anew("its last layer", classes, str(source.path), inputs)]


def drawn_head(source: ModelSource, inputs: Inputs | None) -> int | None:
    """Return the classes of a transformers image classifier's folder where the data has others; None where not."""
    if source.origin != PRETRAINED or source.task != "image" or not isinstance(inputs, ImageInputs):
        return None
    classes = make_config(source, None, {}).num_labels
    return classes if classes != inputs.classes else None
