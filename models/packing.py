"""Check that a model separates the documents that are packed into one sample.

transformers' attention masks separate documents if position ids restart with each document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

from torch import Tensor, nn

from zerofit.models.catalog import ModelError

_MASKED = {"full_attention", "sliding_attention", "chunked_attention"}  # other layers pass a state through the sample


@contextmanager
def refuse_unseparated(model: nn.Module, name: str) -> Iterator[None]:
    """Raise ModelError "model-packing" if the forward in this context mixes documents."""
    from transformers import masking_utils

    original = cast(Callable[..., object], masking_utils._preprocess_mask_arguments)
    separates: list[bool] = []

    def noted(
        config: object, embeds: object, mask: Tensor | None, cache: object, positions: Tensor | None, *args: object
    ) -> object:
        separates.append(positions is not None and mask is None)
        return original(config, embeds, mask, cache, positions, *args)

    kinds = set(getattr(getattr(model, "config", None), "layer_types", None) or ()) - _MASKED
    what = f"its layers of kind {', '.join(sorted(kinds))} do not" if kinds else "its attention does not"
    message = f"{name}: {what} separate conversations that are packed into one sample"
    error = ModelError("model-packing", message, "use --no-packing: one conversation per sample")
    if kinds or "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise error
    # transformers separates documents by position ids only if no mask is given. The model's own code decides what
    # reaches `masking_utils`, so one forward is watched.
    with patch.object(masking_utils, "_preprocess_mask_arguments", noted):
        yield
    if not separates or not all(separates):
        raise error
