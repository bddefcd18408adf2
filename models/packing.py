"""Documents packed into one sample: whether a model keeps them apart.

transformers' attention masks do so where they get position ids that begin anew with each document.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from zerofit.models.catalog import ModelError

_MASKED = {"full_attention", "sliding_attention", "chunked_attention"}  # other layers carry a state through a sample


@contextmanager
def refuse_unseparated(model: nn.Module, name: str) -> Iterator[None]:
    """Watch a forward with position ids. Raises ModelError "model-packing" unless its masks keep documents apart."""
    from transformers import masking_utils

    original, told = masking_utils._preprocess_mask_arguments, []

    def noted(config: Any, inputs_embeds: Any, attention_mask: Any, past: Any, position_ids: Any, *more: Any) -> Any:
        told.append(position_ids is not None and attention_mask is None)
        return original(config, inputs_embeds, attention_mask, past, position_ids, *more)

    kinds = set(getattr(getattr(model, "config", None), "layer_types", None) or ()) - _MASKED
    what = f"its layers of kind {', '.join(sorted(kinds))} do not" if kinds else "its attention does not"
    message = f"{name}: conversations packed into one sample must not see each other, and {what} keep them apart"
    error = ModelError("model-packing", message, "--no-packing: each conversation in a sample of its own")
    if kinds or "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise error
    with patch.object(masking_utils, "_preprocess_mask_arguments", noted):
        yield
    if not told or not all(told):
        raise error
