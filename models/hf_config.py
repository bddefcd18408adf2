"""Configs of transformers: a preset or a file, fitted to a model's inputs and to what a user sets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerofit.models.catalog import PRETRAINED, QUANTIZED, ModelError, ModelSource, nearest, source_config
from zerofit.models.depth import DEPTH, depths, of_all_layers
from zerofit.models.inputs import ImageInputs, Inputs, LabelledTextInputs, NamedInputs, TextInputs
from zerofit.spec.errors import reason_of

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # as Mixtral, DeepSeek and Qwen have it
FRAMES_A_POSITION = 2  # Whisper's second convolution halves them
_OF_LAYERS = ("layer_types", "stage_names", "out_features", "out_indices")

# the most that a config may name, by its key: each of them is made by itself, and transformers counts labels in a list
MOST = {r"(layers?|depths?|stages|blocks)$": 2_000, r"experts$": 100_000, r"^num_labels$": 1_000_000}
KERNELS = re.compile(r"^_?(attn|experts)_implementation")
PLAIN_KERNELS = ("eager", "sdpa", None)  # which come with torch and transformers

# these count positions from behind the padding id
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")


def make_config(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]):
    """Make the transformers config: the preset or file, fitted to the inputs, with `args` on top of both.

    For images it gets the number of labels and channels and the image size; the patch size stays, unless the image is
    smaller than one patch, which is then a quarter of the image. For text the vocabulary stays as it is and must hold
    every id; the sequence must fit into the model's positions.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    # transformers writes {"__float__": "Infinity"}
    base = _trained(PreTrainedConfig._decode_special_floats(source_config(source)))
    model_type = base["model_type"]
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys(), "take a model_type of this transformers version")
        raise ModelError("model-config", f"{source.name}: transformers has no model_type {model_type!r}", hint)
    cls = CONFIG_MAPPING[model_type]
    merged = _merge(cls, base, args, source.name)
    _refuse_endless(source.name, merged)
    with _values_refused(source.name, cls):
        config = cls.from_dict(merged)
        _refuse_no_layers(source.name, config)
        _fit(source, config, inputs, args)
    return config


@contextmanager
def _values_refused(name: str, cls: type) -> Iterator[None]:
    """Turn whatever a config class, or what is derived from its values, raises on bad ones into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises errors of many types on a bad config
        message = f"{name}: {cls.__name__} refuses these values: {reason_of(error)}"
        raise ModelError("model-args", message, "correct --model-args or the config") from None


def _refuse_endless(name: str, values: Any, key: str = "") -> None:
    """Raise ModelError for a number of layers, experts or labels that no model has, and that would be made one by one.

    `values` are a config's, read at any depth.
    """
    if isinstance(values, dict):
        for inner, value in values.items():
            _refuse_endless(name, value, str(inner))
        return
    most = next((most for pattern, most in MOST.items() if re.search(pattern, key)), math.inf)
    numbers = [*values, len(values)] if isinstance(values, list) else [values]
    largest = max((n for n in numbers if isinstance(n, int | float) and n > most), default=None)
    if largest is not None:
        message = f"{name}: {key} is {largest:,}, and a model is built from at most {most:,}"
        raise ModelError("model-args", message, "correct --model-args or the config")


def _refuse_no_layers(name: str, config: Any) -> None:
    for path, count in depths(config).items():
        if count < 1:
            message = f"{name}: {'.'.join(path)} is {count}"
            raise ModelError("model-args", message, "a model has one layer or more: correct --model-args or the config")


def notes_of_config(name: str, values: dict[str, Any]) -> list[str]:
    """Return a sentence on each key of a config that a training leaves out, and what it does in its place."""
    return [f"{name}: {key} {text}" for key, text in _left_out(values)]


def _left_out(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if key == QUANTIZED and value:
            method = value.get("quant_method", "") if isinstance(value, dict) else value
            yield key, f"({method}) is left out: training has whole weights, or --quantize beside adapters (--lora)"
        elif _names_kernel(key, value):
            yield key, f"{value!r} is left out: kernels are torch's (sdpa, which has flash attention on GPUs)"
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", text) for inner, text in _left_out(value))


def _trained(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config without what `notes_of_config` names: transformers would look for kernels on the hub."""
    kept = {key: value for key, value in values.items() if key != QUANTIZED and not _names_kernel(key, value)}
    return {key: _trained(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _names_kernel(key: str, value: Any) -> bool:
    return KERNELS.search(key) is not None and value not in PLAIN_KERNELS


def _fit(source: ModelSource, config: Any, inputs: Inputs | None, args: dict[str, Any]) -> None:
    if isinstance(inputs, ImageInputs) and source.task == "image":
        _fit_images(source, config, inputs, args)
    if isinstance(inputs, NamedInputs):
        _fit_named(config, inputs)
    if isinstance(inputs, LabelledTextInputs):
        _fit_classes(config, inputs, args)
    if isinstance(inputs, TextInputs | LabelledTextInputs | NamedInputs):
        _check_text(source.name, config, inputs)
    text = config.get_text_config()
    # Mixtral: DeepSpeed's sequence parallel attention needs the number
    if vars(text).get("head_dim", 0) is None and of_all_layers(text, "num_attention_heads") is not None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    # a Granite 4 of no experts and a Jamba of one have the options of a router, and none
    routed = not any(of_all_layers(config, name) in (0, 1) for name in EXPERTS)
    if routed and hasattr(config, "router_aux_loss_coef") and hasattr(config, "output_router_logits"):
        config.output_router_logits = True  # without it the experts' balance would go untrained
    config.return_dict = True  # outputs are read by name


def max_positions(config: Any) -> int | None:
    """Return the longest sequence in tokens that a transformers config allows, or None where it names no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    if positions is None or positions <= 0:  # XLNet has -1 for none
        return None
    if getattr(text, "model_type", None) not in _OFFSET_POSITIONS:
        return positions
    return positions - (text.pad_token_id or 0) - 1


def _merge(cls: type, base: dict[str, Any], args: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the config's keys with `args` over them, both under the config class's own names."""
    canonical = getattr(cls, "attribute_map", {})
    known = set(base) | set(canonical) | {"num_labels"} | (set(cls().to_dict()) if args else set())
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


def _fit_images(source: ModelSource, config: Any, inputs: ImageInputs, args: dict[str, Any]) -> None:
    wanted = {"num_labels": inputs.classes, "num_channels": inputs.channels, "image_size": inputs.size}
    for key, value in wanted.items():
        if key in args or (key != "num_labels" and not hasattr(config, key)):
            continue
        if isinstance(getattr(config, key), list | tuple):  # height and width
            value = type(getattr(config, key))([value] * len(getattr(config, key)))
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
