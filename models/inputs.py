"""Describe the inputs of a model: the facts about the data that decide a model's shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Square images with one class label each.

    Images are float32 (batch, channels, size, size), labels int64 (batch,).
    """

    channels: int
    size: int  # height and width in pixels
    classes: int
    # normalisation per channel of pixels between 0 and 1; None if unknown
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

    vocab_size: int  # the tokenizer's number of ids, with special tokens
    seq_len: int
    mask_id: int | None = None  # the id that replaces a token in masked language modeling
    packed: bool = False  # samples have several documents, separated by position ids


@dataclass(frozen=True, kw_only=True)
class LabelledTextInputs:
    """Padded texts with a class for each text or (`tags`) each token.

    Ids are int64 (batch, seq_len), with a mask.
    """

    vocab_size: int  # the tokenizer's number of ids, with special tokens
    seq_len: int
    classes: tuple[str, ...]  # names, in the order of ids
    pad_id: int
    tags: bool = False
    pairs: bool = False  # texts have two parts, marked by "token_type_ids"


@dataclass(frozen=True, kw_only=True)
class NamedInput:
    """One named tensor of a model's forward, for one sample."""

    name: str  # of the forward's argument
    shape: tuple[int, ...]  # without the batch
    ids: int | None = None  # int64 ids below this number; None: float32
    first: tuple[int, int] | None = None  # an id, and how often it is repeated at the beginning of a sample
    image: tuple[int, int] | None = None  # channels and side of the image behind these patches or latents


@dataclass(frozen=True, kw_only=True)
class NamedInputs:
    """Named tensors of a model that returns its own loss.

    See `zerofit.spec.model_facts.gives_loss`.
    """

    tensors: tuple[NamedInput, ...]  # the first is "inputs" in a batch, the last "labels"
    vocab_size: int  # 0: no ids
    seq_len: int | None  # tokens per sample (of the encoder, if there is one); None: latents
    padded: bool = False  # samples may end early; labels there are -100 and are ignored by the loss


@dataclass(frozen=True, kw_only=True)
class Fed:
    """The user's settings of the inputs. If a setting is None, the model's config decides."""

    image: tuple[int, int] | None = None  # channels, side in pixels
    decoder: int | None = None  # tokens of the decoder
    frames: int | None = None  # of a spectrogram
    packed: bool | None = None  # samples of text have several documents, which must not attend to each other
    features: int | None = None  # columns of a table

    def set_names(self) -> list[str]:
        """Return the names of the settings that are not None."""
        return [name for name, value in vars(self).items() if value is not None]


Inputs = ImageInputs | TableInputs | TextInputs | LabelledTextInputs | NamedInputs

# names in JSON: run folders, zerofit.json and models/data have inputs
_KINDS: dict[str, type[Inputs]] = {
    "text": TextInputs,
    "segmentation": SegmentationInputs,  # before its base class
    "image": ImageInputs,
    "table": TableInputs,
    "labelled-text": LabelledTextInputs,
    "named": NamedInputs,
}


def inputs_to_dict(inputs: Inputs) -> dict[str, object]:
    """Return inputs as JSON: their fields, and "kind", a key of `_KINDS`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(inputs, cls))
    return {"kind": kind, **asdict(inputs)}


def inputs_from_dict(value: object) -> Inputs:
    """Return the inputs from a dictionary that `inputs_to_dict` made.

    Raises ValueError for other values.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown kind of inputs {kind!r}; known: {', '.join(_KINDS)}")
    return TypeAdapter(_KINDS[kind]).validate_python(value)


def are_packed(inputs: Inputs | None) -> bool:
    """Return whether samples have several documents, which must not attend to each other."""
    return isinstance(inputs, TextInputs) and inputs.packed


def are_tokenized(inputs: Inputs | None) -> bool:
    """Return whether the inputs come from a tokenizer."""
    return isinstance(inputs, TextInputs | LabelledTextInputs) or (isinstance(inputs, NamedInputs) and inputs.padded)


def are_padded(inputs: Inputs | None) -> bool:
    """Return whether samples may end early, with a mask."""
    return isinstance(inputs, LabelledTextInputs) or (isinstance(inputs, NamedInputs) and inputs.padded)


def tensors_of(inputs: Inputs) -> tuple[NamedInput, ...]:
    """Return the tensors of a sample.

    A batch has the first under "inputs" and the last under "labels".
    """
    if isinstance(inputs, NamedInputs):
        return inputs.tensors
    if isinstance(inputs, ImageInputs):
        pixels = (inputs.channels, inputs.size, inputs.size)
        label_shape = pixels[1:] if isinstance(inputs, SegmentationInputs) else ()
        labels = NamedInput(name="labels", shape=label_shape, ids=inputs.classes)
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
