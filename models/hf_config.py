"""Make transformers configs from a preset or file, for the inputs and user's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofit.models.catalog import PRETRAINED, QUANTIZED, ModelError, ModelSource, source_config
from zerofit.models.depth import DEPTH, depths, of_all_layers
from zerofit.models.inputs import ImageInputs, Inputs, LabelledTextInputs, NamedInputs, TextInputs
from zerofit.models.presets import Config, ModelArgs
from zerofit.spec.errors import nearest, reason_of
from zerofit.spec.model_facts import ATTENTION_KERNELS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # of Mixtral, DeepSeek and Qwen
FRAMES_A_POSITION = 2  # Whisper's second convolution has stride 2
_OF_LAYERS = ("layer_types", "stage_names", "out_features", "out_indices")

# limits by key: each layer and expert is built separately, and transformers makes a list of the labels
MOST = {r"(layers?|depths?|stages|blocks)$": 2_000, r"experts$": 100_000, r"^num_labels$": 1_000_000}
KERNELS = re.compile(r"^_?(attn|experts)_implementation")
PLAIN_KERNELS = ("eager", "sdpa", None)  # part of torch and transformers
ATTENTION = "attn_implementation"
DTYPE = "dtype"
# Model types whose layers need a package of kernels (transformers' use_kernel_func_from_hub_with_fallback). Traces run
# transformers' own code instead, except Mamba's, whose kernels have stand-ins (models/state_space.py).
_STATE_SPACE = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba", "zamba2")
_LINEAR_ATTENTION = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "kimi_linear")
_LINEAR_ATTENTION += ("glm5_next", "bailing_hybrid", "lara_mini")
_KERNEL_PACKAGES: dict[str, str] = {
    **dict.fromkeys(_STATE_SPACE, "mamba-ssm"),
    **dict.fromkeys(_LINEAR_ATTENTION, "flash-linear-attention"),
}

# these model types count positions from the padding id + 1
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")


def make_config(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> PreTrainedConfig:
    """Return the transformers config of a preset or file, adapted to the inputs.

    `args` override its keys. For images, the numbers of labels and channels and the image size are set. If an image is
    smaller than a patch, the patch becomes a quarter of the image. For text, all ids must be in the vocabulary, and the
    sequence must fit the model's positions.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    # transformers writes {"__float__": "Infinity"}
    base = _without_ignored(PreTrainedConfig._decode_special_floats(source_config(source)))
    model_type = base["model_type"]
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys()) or "use a model_type of this transformers version"
        if "auto_map" in base:  # the model is Python code in its own repository
            hint = "simulate your training script, which loads the model's own code: zerofit simulate -- COMMAND"
        raise ModelError("model-config", f"{source.name}: transformers has no model_type {model_type!r}", hint)
    cls = CONFIG_MAPPING[model_type]
    merged = _merge(cls, base, args, source.name)
    _refuse_endless(source.name, merged)
    try:
        config: PreTrainedConfig = cls.from_dict(merged)
        for path, count in depths(config).items():
            if count < 1:
                message = f"{source.name}: {'.'.join(path)} is {count}"
                raise ModelError("model-args", message, "use 1 or more: correct --model-args or the config")
        _fit(source, config, inputs, args)
    except ModelError:
        raise
    except Exception as error:  # a bad config raises many types of errors
        message = f"{source.name}: {cls.__name__} refuses these values: {reason_of(error)}"
        raise ModelError("model-args", message, "correct --model-args or the config") from None
    return config


def traced_args(model_args: ModelArgs) -> ModelArgs:
    """Return the model's arguments that change the traced costs.

    A fused attention kernel is left out, since kernels differ only in their rates. The weights' dtype is left out,
    since the run's precision replaces it.
    """
    fused = model_args.get(ATTENTION) in ATTENTION_KERNELS and model_args[ATTENTION] != "eager"
    left_out = (DTYPE, ATTENTION) if fused else (DTYPE,)
    return {name: value for name, value in model_args.items() if name not in left_out}


def weight_bytes(model_args: ModelArgs) -> int:
    """Return the bytes per element of FSDP2's weights: 2 for a 16-bit dtype, else 4."""
    return 2 if str(model_args.get(DTYPE)).removeprefix("torch.") in ("bfloat16", "float16") else 4


def _refuse_endless(name: str, values: object, key: str = "") -> None:
    """Raise ModelError for an impossible number of layers, experts or labels in a config."""
    if isinstance(values, dict):
        for inner, value in values.items():
            _refuse_endless(name, value, str(inner))
        return
    most = next((most for pattern, most in MOST.items() if re.search(pattern, key)), math.inf)
    # A list's length counts, too: configs list the kind of each layer.
    numbers = [*values, len(values)] if isinstance(values, list) else [values]
    largest = max((n for n in numbers if isinstance(n, int | float) and n > most), default=None)
    if largest is not None:
        message = f"{name}: {key} is {largest:,}; allowed: at most {most:,}"
        raise ModelError("model-args", message, "correct --model-args or the config")


def notes_of_config(name: str, values: Config) -> list[str]:
    """Return notes on a config's keys that training ignores, and on unusable kernels."""
    notes = [f"{name}: {key} {text}" for key, text in _ignored_keys(values)]
    package = _KERNEL_PACKAGES.get(str(values.get("model_type")).removesuffix("_text"))
    if package:
        notes.append(f"{name}: forecasts are for transformers' own code; with {package} runs need less memory and time")
    return notes


def _ignored_keys(values: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that training ignores, with the reason."""
    for key, value in values.items():
        if key == QUANTIZED and value:
            method = value.get("quant_method", "") if isinstance(value, dict) else value
            yield key, f"({method}) is ignored: training uses full weights, or --quantize with adapters (--lora)"
        elif _names_kernel(key, value):
            yield key, f"{value!r} is ignored: torch's kernels are used (sdpa, with flash attention on GPUs)"
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", text) for inner, text in _ignored_keys(value))


# A config from the hub can name attention kernels of other packages. transformers would download them; zerofit measures
# and trains with torch's own.
def _without_ignored(values: Config) -> Config:
    """Return a config without the keys that training ignores."""
    used = {key: value for key, value in values.items() if key != QUANTIZED and not _names_kernel(key, value)}
    return {key: _without_ignored(value) if isinstance(value, dict) else value for key, value in used.items()}


def _names_kernel(key: str, value: object) -> bool:
    return KERNELS.search(key) is not None and value not in PLAIN_KERNELS


def _fit(source: ModelSource, config: PreTrainedConfig, inputs: Inputs | None, args: ModelArgs) -> None:
    if isinstance(inputs, ImageInputs) and source.task == "image":
        _fit_images(source, config, inputs, args)
    if isinstance(inputs, NamedInputs):
        _fit_named(config, inputs)
    if isinstance(inputs, LabelledTextInputs):
        _fit_classes(config, inputs, args)
    if isinstance(inputs, TextInputs | LabelledTextInputs | NamedInputs):
        _check_text(source.name, config, inputs)
    text = config.get_text_config()
    # Mixtral: DeepSpeed's sequence parallel attention needs this number
    if vars(text).get("head_dim", 0) is None and of_all_layers(text, "num_attention_heads") is not None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    # a Granite 4 without experts and a Jamba with one have router options, but no router
    routed = not any(of_all_layers(config, name) in (0, 1) for name in EXPERTS)
    if routed and hasattr(config, "router_aux_loss_coef") and hasattr(config, "output_router_logits"):
        config.output_router_logits = True  # needed to train the experts' balance
    config.return_dict = True  # outputs are read by name


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum sequence length in tokens of a config; None without a limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    if positions is None or positions <= 0:  # XLNet has -1 for no limit
        return None
    if getattr(text, "model_type", None) not in _OFFSET_POSITIONS:
        return positions
    return positions - (text.pad_token_id or 0) - 1


def _merge(cls: type, base: Config, args: ModelArgs, name: str) -> Config:
    canonical = getattr(cls, "attribute_map", {})
    known = set(base) | set(canonical) | {"num_labels", ATTENTION} | (set(cls().to_dict()) if args else set())
    for key in args:
        if key not in known:
            documented = f"see the documentation of {cls.__name__} in transformers"
            hint = nearest(key, known - {"model_type", "architectures"}) or documented
            message = f"{name}: {key!r} is not a key of {cls.__name__}"
            raise ModelError("model-args", message, hint)
    merged = _without_old_layers({canonical.get(key, key): value for key, value in base.items()}, args, canonical)
    for key, value in args.items():
        if key == ATTENTION and value not in ATTENTION_KERNELS:
            message, hint = f"{name}: {ATTENTION} is {value!r}", f"use one of {', '.join(ATTENTION_KERNELS)}"
            raise ModelError("model-args", message, hint)
        # other packages' kernels have the shapes of torch's; `transformers_model` sets them for training
        value = "sdpa" if key == ATTENTION and value not in PLAIN_KERNELS else value
        class_key = canonical.get(key, key)
        inner = merged.get(class_key)
        if isinstance(inner, dict) and isinstance(value, dict):  # an inner model's config: other keys stay
            value = {**_without_old_layers(inner, value, {}), **value}
        merged[class_key] = value
    return merged


# Configs like Qwen's list the kind of each layer. With another number of layers, transformers makes a new list.
def _without_old_layers(base: Config, args: ModelArgs, canonical: dict[str, str]) -> Config:
    """Return the config without its lists of values per layer if the args change the depth."""
    if DEPTH not in {canonical.get(key, key) for key in args} | set(args):
        return base
    return {key: value for key, value in base.items() if key not in _OF_LAYERS or key in args}


# A new model gets the data's shape. A pretrained model cannot, since its position embeddings and patches are learned.
def _fit_images(source: ModelSource, config: PreTrainedConfig, inputs: ImageInputs, args: ModelArgs) -> None:
    wanted = {"num_labels": inputs.classes, "num_channels": inputs.channels, "image_size": inputs.size}
    for key, value in wanted.items():
        if key in args or (key != "num_labels" and not hasattr(config, key)):
            continue
        if isinstance(getattr(config, key), list | tuple):  # height and width
            value = type(getattr(config, key))([value] * len(getattr(config, key)))
        if source.origin == PRETRAINED and key != "num_labels" and getattr(config, key) != value:
            message = f"{source.name} was trained with {key} {getattr(config, key)}, but the data has {value}"
            hint = f"use --image-size {config.image_size}" if key == "image_size" else "use other data, or a new model"
            raise ModelError("model-shape", message, hint)
        setattr(config, key, value)
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int) and isinstance(getattr(config, "image_size", None), int):
        if inputs.size < patch and "patch_size" not in args:
            config.patch_size = patch = max(1, inputs.size // 4)
        if patch < 1:
            raise ModelError("model-args", f"{source.name}: patch_size is {patch}", "use 1 or more")
        if config.image_size % patch:
            message = f"{source.name}: image size {config.image_size} is not a multiple of the patch size {patch}"
            nearest_size = max(1, round(config.image_size / patch)) * patch
            hint = f"use --image-size {nearest_size}, or --model-args '{{\"patch_size\": N}}'"
            raise ModelError("model-shape", message, hint)


# A decoder's head finds the last token of a text by the padding id.
def _fit_classes(config: PreTrainedConfig, inputs: LabelledTextInputs, args: ModelArgs) -> None:
    """Set the class names and the padding id."""
    if "num_labels" not in args:
        config.id2label = dict(enumerate(inputs.classes))
        config.label2id = {name: number for number, name in enumerate(inputs.classes)}
    if not inputs.tags:
        config.problem_type = "single_label_classification"
    config.get_text_config().pad_token_id = inputs.pad_id


def _fit_named(config: PreTrainedConfig, inputs: NamedInputs) -> None:
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as in T5
    for tensor in inputs.tensors:
        if tensor.name == "pixel_values" and tensor.image is None:
            config.vision_config.num_channels, config.vision_config.image_size = tensor.shape[:2]
        if tensor.name == "input_features":
            config.max_source_positions = tensor.shape[1] // FRAMES_A_POSITION


def _check_text(name: str, config: PreTrainedConfig, inputs: TextInputs | LabelledTextInputs | NamedInputs) -> None:
    text = config.get_text_config()
    vocab, positions = getattr(text, "vocab_size", None), max_positions(config)
    if vocab is not None and inputs.vocab_size > vocab:
        message = f"{name} has a vocabulary of {vocab} ids, but the tokenizer has {inputs.vocab_size}"
        hint = f"use --model-args '{{\"vocab_size\": {inputs.vocab_size}}}', or another --tokenizer"
        raise ModelError("model-shape", message, hint)
    if isinstance(inputs, NamedInputs):
        longest = max(tensor.shape[0] for tensor in inputs.tensors if tensor.ids is not None)
    else:
        longest = inputs.seq_len
    if positions is not None and longest > positions:
        message = f"{name} supports at most {positions} tokens, not {longest}"
        raise ModelError("model-shape", message, f"use --seq-len {positions} or less")
