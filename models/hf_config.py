"""Configs of transformers: a preset or a file, fitted to a model's inputs and to what a user sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofit.models.catalog import PRETRAINED, ModelError, ModelSource, nearest, read_config
from zerofit.models.depth import DEPTH
from zerofit.models.inputs import ImageInputs, Inputs, LabelledTextInputs, NamedInputs, TextInputs
from zerofit.models.presets import PRESETS

FRAMES_A_POSITION = 2  # Whisper's second convolution halves them
_OF_LAYERS = ("layer_types", "stage_names", "out_features", "out_indices")

# these count positions from behind the padding id
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")


def make_config(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]):
    """Make the transformers config: the preset or file, fitted to the inputs, with `args` on top of both.

    For images it gets the number of labels and channels and the image size; the patch size stays, unless the image is
    smaller than one patch, which is then a quarter of the image. For text the vocabulary stays as it is and must hold
    every id; the sequence must fit into the model's positions.
    """
    from transformers import CONFIG_MAPPING

    if source.origin == "preset":
        base = dict(PRESETS[source.name])
    else:
        assert source.path is not None  # of a source that is neither a preset nor a name
        path = Path(source.path)
        base = read_config(path / "config.json" if path.is_dir() else path)
    model_type = base["model_type"]
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys(), "take a model_type of this transformers version")
        raise ModelError("model-config", f"{source.name}: transformers has no model_type {model_type!r}", hint)
    cls = CONFIG_MAPPING[model_type]
    merged = _merge(cls, base, args, source.name)
    config = _validated(cls, merged, source.name)
    if isinstance(inputs, ImageInputs) and source.task == "image":
        _fit_images(source, config, inputs, args)
    if isinstance(inputs, NamedInputs):
        _fit_named(config, inputs)
    if isinstance(inputs, LabelledTextInputs):
        _fit_classes(config, inputs, args)
    if isinstance(inputs, TextInputs | LabelledTextInputs | NamedInputs):
        _check_text(source.name, config, inputs)
    text = config.get_text_config()
    if getattr(text, "head_dim", 0) is None:  # Mixtral: DeepSpeed's sequence parallel attention needs the number
        text.head_dim = text.hidden_size // text.num_attention_heads
    if hasattr(config, "router_aux_loss_coef") and hasattr(config, "output_router_logits"):
        config.output_router_logits = True  # without it the experts' balance would go untrained
    return config


def max_positions(config: Any) -> int | None:
    """Return the longest sequence in tokens that a transformers config allows, or None where it names no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    if positions is None or getattr(text, "model_type", None) not in _OFFSET_POSITIONS:
        return positions
    return positions - (text.pad_token_id or 0) - 1


def _merge(cls: type, base: dict[str, Any], args: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the config's keys with `args` over them, both under the config class's own names."""
    canonical = getattr(cls, "attribute_map", {})
    known = set(cls().to_dict()) | set(canonical) | {"num_labels"} | set(base)
    for key in args:
        if key not in known:
            documented = f"see transformers' documentation of {cls.__name__}"
            hint = nearest(key, known - {"model_type", "architectures"}, documented)
            message = f"{name}: {key!r} is not a key of {cls.__name__}"
            raise ModelError("model-args", message, hint)
    merged = _without_old_layers({canonical.get(key, key): value for key, value in base.items()}, args, canonical)
    for key, value in args.items():
        own = canonical.get(key, key)
        inner = merged.get(own)
        if isinstance(inner, dict) and isinstance(value, dict):  # of a model within: what is not named stays
            value = {**_without_old_layers(inner, value, {}), **value}
        merged[own] = value
    return merged


def _without_old_layers(base: dict[str, Any], args: dict[str, Any], canonical: dict[str, str]) -> dict[str, Any]:
    """Leave out what a config says of each of its layers, where the args name another number of them."""
    if DEPTH not in {canonical.get(key, key) for key in args} | set(args):
        return base
    return {key: value for key, value in base.items() if key not in _OF_LAYERS or key in args}


def _validated(cls: type, values: dict[str, Any], name: str):
    try:
        return cls.from_dict(values)
    except Exception as error:  # transformers raises errors of many types on a bad config
        message = f"{name}: {cls.__name__} refuses these values: {first_line(error)}"
        raise ModelError("model-args", message, "correct --model-args or the config") from None


def _fit_images(source: ModelSource, config: Any, inputs: ImageInputs, args: dict[str, Any]) -> None:
    wanted = {"num_labels": inputs.classes, "num_channels": inputs.channels, "image_size": inputs.size}
    for key, value in wanted.items():
        if key in args or (key != "num_labels" and not hasattr(config, key)):
            continue
        if source.origin == PRETRAINED and key != "num_labels" and getattr(config, key) != value:
            message = f"{source.name} was trained with {key} {getattr(config, key)}, the data has {value}"
            hint = f"--image-size {config.image_size}" if key == "image_size" else "take other data, or a fresh model"
            raise ModelError("model-shape", message, hint)
        setattr(config, key, value)
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int) and isinstance(getattr(config, "image_size", None), int):
        if inputs.size < patch and "patch_size" not in args:
            config.patch_size = patch = max(1, inputs.size // 4)
        if patch < 1:
            raise ModelError("model-args", f"{source.name}: patch_size is {patch}", "take one from 1 on")
        if config.image_size % patch:
            message = f"{source.name}: image size {config.image_size} is not a multiple of the patch size {patch}"
            nearest_size = max(1, round(config.image_size / patch)) * patch
            hint = f"--image-size {nearest_size}, or another patch: --model-args '{{\"patch_size\": N}}'"
            raise ModelError("model-shape", message, hint)


def _fit_classes(config: Any, inputs: LabelledTextInputs, args: dict[str, Any]) -> None:
    """Name the classes, and the padding, behind which a decoder's head finds the last token of a text."""
    if "num_labels" not in args:
        config.id2label = dict(enumerate(inputs.classes))
        config.label2id = {name: number for number, name in enumerate(inputs.classes)}
    if not inputs.tags:
        config.problem_type = "single_label_classification"
    config.get_text_config().pad_token_id = inputs.pad_id


def _fit_named(config: Any, inputs: NamedInputs) -> None:
    """Give the config the size of its images or the length of its spectrograms, and what a decoder begins with."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # with which T5 begins
    for one in inputs.tensors:
        if one.name == "pixel_values" and one.image is None:
            config.vision_config.num_channels, config.vision_config.image_size = one.shape[:2]
        if one.name == "input_features":
            config.max_source_positions = one.shape[1] // FRAMES_A_POSITION


def _check_text(name: str, config: Any, inputs: TextInputs | LabelledTextInputs | NamedInputs) -> None:
    text = config.get_text_config()
    vocab, positions = getattr(text, "vocab_size", None), max_positions(config)
    if vocab is not None and inputs.vocab_size > vocab:
        message = f"{name} has a vocabulary of {vocab} ids, the tokenizer gives {inputs.vocab_size}"
        hint = f"--model-args '{{\"vocab_size\": {inputs.vocab_size}}}', or another --tokenizer"
        raise ModelError("model-shape", message, hint)
    if isinstance(inputs, NamedInputs):
        longest = max(one.shape[0] for one in inputs.tensors if one.ids is not None)
    else:
        longest = inputs.seq_len
    if positions is not None and longest > positions:
        message = f"{name} takes at most {positions} tokens, got sequences of {longest}"
        raise ModelError("model-shape", message, f"--seq-len {positions}, or less")


def first_line(error: Exception) -> str:
    """Return the first line of an error that says anything, or its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
