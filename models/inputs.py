"""Inputs of a model: the facts of the data that a model's shape depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter


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

_KINDS: dict[str, type[TextInputs] | type[ImageInputs]] = {"text": TextInputs, "image": ImageInputs}


def inputs_to_dict(inputs: Inputs) -> dict[str, Any]:
    """Return inputs as JSON: their fields, and "kind", "text" or "image"."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(inputs, cls))
    return {"kind": kind, **asdict(inputs)}


def inputs_from_dict(value: Any) -> Inputs:
    """Return the inputs that `inputs_to_dict` described. Raises ValueError for anything else."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"inputs are of kind text or image, not {kind!r}")
    return TypeAdapter(_KINDS[kind]).validate_python(value)
