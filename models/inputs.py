"""What a model is fed: the facts of the data that a model's shape depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Square images with one class label each: float32 (batch, channels, size, size) and int64 (batch,)."""

    channels: int
    size: int  # height and width in pixels
    classes: int


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Token sequences: int64 (batch, seq_len), ids below vocab_size."""

    vocab_size: int  # ids the tokenizer can give, special tokens included
    seq_len: int
    mask_id: int | None = None  # the id that masked-LM training puts in place of a token


Inputs = ImageInputs | TextInputs
