"""The inputs of a model where no data is named."""

from __future__ import annotations

from typing import Any

from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import ImageInputs, Inputs, TextInputs
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.task import DEFAULT_SEQ_LEN, Task


def assumed_inputs(
    source: ModelSource, task: Task, seq_len: int | None, image: str | None, model_args: dict[str, Any]
) -> Inputs:
    """Return the model's published images, those of `--input`, or tokens of its whole vocabulary. Raises UserError."""
    from zerofit.models.cnn import PUBLISHED_INPUTS
    from zerofit.models.hf import make_config
    from zerofit.models.vision import IMAGENET

    if task == "image":
        published = PUBLISHED_INPUTS.get(source.name, IMAGENET)
        if image is None:
            return published
        channels, size = parse_image(image)
        return ImageInputs(channels=channels, size=size, classes=published.classes)
    config = make_config(source, None, model_args) if source.family == "transformers" else None
    vocabulary = getattr(config, "vocab_size", None) or model_args.get("vocab_size") or 2
    return TextInputs(vocab_size=vocabulary, seq_len=seq_len or DEFAULT_SEQ_LEN)


def parse_image(text: str) -> tuple[int, int]:
    """Return channels and pixels of "image:3x224x224". Raises UserError."""
    parts = text.removeprefix("image:").split("x")
    if len(parts) == 3 and all(p.isdigit() and int(p) for p in parts) and parts[1] == parts[2]:
        return int(parts[0]), int(parts[1])
    message = f"{text!r} is not a valid input"
    hint = "write channels, height and width of square images: image:3x224x224"
    raise UserError(Problem(kind="bad-value", message=message, hint=hint, where="--input"))
