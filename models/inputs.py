"""Inputs of a model: the facts of the data that a model's shape depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Square images with one class label each: float32 (batch, channels, size, size) and int64 (batch,)."""

    channels: int
    size: int  # height and width in pixels
    classes: int
    # by channel, of pixels between 0 and 1: what they are scaled by; None where that is not known
    mean: tuple[float, ...] | None = field(default=None, compare=False)
    std: tuple[float, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class SegmentationInputs(ImageInputs):
    """Square images with a class for each pixel: labels int64 (batch, size, size)."""


@dataclass(frozen=True, kw_only=True)
class TableInputs:
    """Rows of a table with one class label each: float32 (batch, features) and int64 (batch,)."""

    features: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Token sequences: int64 (batch, seq_len), ids below vocab_size."""

    vocab_size: int  # ids the tokenizer can give, special tokens included
    seq_len: int
    mask_id: int | None = None  # the id that masked-LM training puts in place of a token
    packed: bool = False  # documents in one sample that must not see each other: position ids say where each begins


@dataclass(frozen=True, kw_only=True)
class LabelledTextInputs:
    """Padded texts, with a class for each or (`tags`) for each token: int64 (batch, seq_len), and a mask of them."""

    vocab_size: int  # ids the tokenizer can give, special tokens included
    seq_len: int
    classes: tuple[str, ...]  # their names, in the order of their ids
    pad_id: int
    tags: bool = False
    pairs: bool = False  # a text has two parts, which "token_type_ids" tell apart


@dataclass(frozen=True, kw_only=True)
class NamedInput:
    """One tensor that a model's forward takes by name, as a sample has it."""

    name: str  # of the forward's argument
    shape: tuple[int, ...]  # without the batch
    ids: int | None = None  # int64 ids below this number; None: float32
    first: tuple[int, int] | None = None  # an id, and how often a sample of ids begins with it
    image: tuple[int, int] | None = None  # channels and side of the image that these patches or latents are of


@dataclass(frozen=True, kw_only=True)
class NamedInputs:
    """Tensors by name, of a model that gives its own loss (see `zerofit.spec.model_facts.gives_loss`)."""

    tensors: tuple[NamedInput, ...]  # the first is what a batch calls "inputs", the last its "labels"
    vocab_size: int  # 0: no ids are read
    seq_len: int | None  # tokens of a sample: an encoder's where text goes into one, else the text's; None: latents
    padded: bool = False  # samples may end early: labels there are -100, and the loss is the mean over the others


@dataclass(frozen=True, kw_only=True)
class Fed:
    """What a user has said of the inputs; None where the model's config decides."""

    image: tuple[int, int] | None = None  # channels, pixels of a side
    decoder: int | None = None  # tokens of the decoder
    frames: int | None = None  # of a spectrogram
    packed: bool | None = None  # a sample of text holds documents that must not see each other
    features: int | None = None  # columns of a table

    def given(self) -> list[str]:
        """Return the names of what was said."""
        return [name for name, value in vars(self).items() if value is not None]


Inputs = ImageInputs | TableInputs | TextInputs | LabelledTextInputs | NamedInputs

_KINDS: dict[str, type[Inputs]] = {
    "text": TextInputs,
    "segmentation": SegmentationInputs,  # before the kind that it is one of
    "image": ImageInputs,
    "table": TableInputs,
    "labelled-text": LabelledTextInputs,
    "named": NamedInputs,
}


def inputs_to_dict(inputs: Inputs) -> dict[str, Any]:
    """Return inputs as JSON: their fields, and their "kind": a key of `_KINDS`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(inputs, cls))
    return {"kind": kind, **asdict(inputs)}


def inputs_from_dict(value: Any) -> Inputs:
    """Return the inputs that `inputs_to_dict` described. Raises ValueError for anything else."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"inputs are of kind {', '.join(_KINDS)}, not {kind!r}")
    return TypeAdapter(_KINDS[kind]).validate_python(value)


def are_packed(inputs: Inputs | None) -> bool:
    """Return whether a sample holds documents that must not see each other."""
    return isinstance(inputs, TextInputs) and inputs.packed


def are_tokenized(inputs: Inputs | None) -> bool:
    """Return whether a tokenizer made them of text."""
    return isinstance(inputs, TextInputs | LabelledTextInputs) or (isinstance(inputs, NamedInputs) and inputs.padded)


def are_padded(inputs: Inputs | None) -> bool:
    """Return whether samples may end early, with a mask that says where."""
    return isinstance(inputs, LabelledTextInputs) or (isinstance(inputs, NamedInputs) and inputs.padded)


def tensors_of(inputs: Inputs) -> tuple[NamedInput, ...]:
    """Return the tensors of a sample, the first one "inputs" and the last one "labels" in a batch."""
    if isinstance(inputs, NamedInputs):
        return inputs.tensors
    if isinstance(inputs, ImageInputs):
        pixels = (inputs.channels, inputs.size, inputs.size)
        places = pixels[1:] if isinstance(inputs, SegmentationInputs) else ()
        labels = NamedInput(name="labels", shape=places, ids=inputs.classes)
        return NamedInput(name="pixel_values", shape=pixels), labels
    if isinstance(inputs, TableInputs):
        features = NamedInput(name="features", shape=(inputs.features,))
        return features, NamedInput(name="labels", shape=(), ids=inputs.classes)
    tokens = {"shape": (inputs.seq_len,), "ids": inputs.vocab_size}
    if isinstance(inputs, LabelledTextInputs):
        names = ("attention_mask", "token_type_ids") if inputs.pairs else ("attention_mask",)
        marks = [NamedInput(name=name, shape=(inputs.seq_len,), ids=2) for name in names]
        shape = (inputs.seq_len,) if inputs.tags else ()
        labels = NamedInput(name="labels", shape=shape, ids=len(inputs.classes))
        return NamedInput(name="input_ids", **tokens), *marks, labels
    positions = NamedInput(name="position_ids", shape=(inputs.seq_len,), ids=inputs.seq_len)
    between = (positions,) if inputs.packed else ()
    return NamedInput(name="input_ids", **tokens), *between, NamedInput(name="labels", **tokens)
