"""What models are trained to do, and the constants that every room reads the same way."""

from __future__ import annotations

from typing import Literal

Task = Literal["image", "causal-lm", "masked-lm", "gan"]

IGNORE_INDEX = -100  # the label that counts in no loss (torch's and transformers' own choice)
DEFAULT_SEQ_LEN = 1024  # tokens of a sample where a user names none, or what the model takes where that is less


def is_text(task: str) -> bool:
    """Whether a task reads tokens; the others read images."""
    return task in ("causal-lm", "masked-lm")
