"""transformers models: the config a model gets for its inputs, and the model from it or from a pretrained folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofit.models.catalog import PRETRAINED, ModelError, ModelSource, nearest, read_config
from zerofit.models.initial import as_without_zero3, initialise, rotary_in_fp32
from zerofit.models.inputs import ImageInputs, Inputs, TextInputs
from zerofit.models.presets import PRESETS

# these count positions from behind the padding id
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod")


def transformers_model(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]) -> nn.Module:
    """Build a transformers model in fp32 on the current default device: pretrained, or with random initial weights.

    Initial weights are drawn as transformers' own `initialize_weights` draws them, on the CPU, and nothing else is
    drawn: so the same numbers come out whole, stage by stage (`materialise`), and partitioned as the model is built
    (an HfDeepSpeedConfig of ZeRO stage 3 alive). `from_config` alone would first draw torch's default weights, except
    under ZeRO-3, and so begin elsewhere.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    config = make_config(source, inputs, args)
    device = torch.empty(0).device
    if source.origin == PRETRAINED and device.type != "meta":
        return rotary_in_fp32(_pretrained(source, config))
    if is_deepspeed_zero3_enabled() and device.type != "meta":
        with as_without_zero3():
            return rotary_in_fp32(_from_config(source, config))
    with torch.device("meta"):
        model = rotary_in_fp32(_from_config(source, config))
    return model if device.type == "meta" else initialise(model).to(device)


def make_config(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]):
    """Make the transformers config: the preset or file, fitted to the inputs, with `args` on top of both.

    For images it gets the number of labels and channels and the image size; the patch size stays, unless the image is
    smaller than one patch, which is then a quarter of the image. For text the vocabulary stays as it is and must hold
    every id; the sequence must fit into the model's positions.
    """
    from transformers import CONFIG_MAPPING

    base = dict(PRESETS[source.name]) if source.origin == "preset" else read_config(_config_file(source))
    model_type = base["model_type"]
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys(), "take a model_type of this transformers version")
        raise ModelError("model-config", f"{source.name}: transformers has no model_type {model_type!r}", hint)
    cls = CONFIG_MAPPING[model_type]
    merged = _merge(cls, base, args, source.name)
    config = _validated(cls, merged, source.name)
    if isinstance(inputs, ImageInputs) and source.task == "image":
        _fit_images(source, config, inputs, args)
    if isinstance(inputs, TextInputs):
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
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or getattr(text, "model_type", None) not in _OFFSET_POSITIONS:
        return positions
    return positions - (text.pad_token_id or 0) - 1


def _config_file(source: ModelSource) -> Path:
    assert source.path is not None  # of a source that is neither a preset nor a name
    path = Path(source.path)
    return path / "config.json" if path.is_dir() else path


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
    if "num_hidden_layers" in {canonical.get(key, key) for key in args} | set(args) and "layer_types" not in args:
        base = {key: value for key, value in base.items() if key != "layer_types"}  # one an old layer
    merged = {canonical.get(key, key): value for key, value in base.items()}
    return merged | {canonical.get(key, key): value for key, value in args.items()}


def _validated(cls: type, values: dict[str, Any], name: str):
    try:
        return cls.from_dict(values)
    except Exception as error:  # transformers raises errors of many types on a bad config
        message = f"{name}: {cls.__name__} refuses these values: {_first_line(error)}"
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


def _check_text(name: str, config: Any, inputs: TextInputs) -> None:
    text = config.get_text_config()
    vocab, positions = getattr(text, "vocab_size", None), max_positions(config)
    if vocab is not None and inputs.vocab_size > vocab:
        message = f"{name} has a vocabulary of {vocab} ids, the tokenizer gives {inputs.vocab_size}"
        hint = f"--model-args '{{\"vocab_size\": {inputs.vocab_size}}}', or another --tokenizer"
        raise ModelError("model-shape", message, hint)
    if positions is not None and inputs.seq_len > positions:
        message = f"{name} takes at most {positions} tokens, got sequences of {inputs.seq_len}"
        raise ModelError("model-shape", message, f"--seq-len {positions}, or less")


def _auto_class(task: str):
    import transformers

    return getattr(transformers, AUTO_CLASSES[task])


def _from_config(source: ModelSource, config: Any) -> nn.Module:
    """Build the bare model in fp32; transformers takes sdpa attention wherever the model has it."""
    try:
        return _auto_class(source.task).from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # a shape that does not fit shows in many ways
        message = f"{source.name} cannot be built from its config: {_first_line(error)}"
        raise ModelError("model-args", message, "correct --model-args or the config") from error


def _pretrained(source: ModelSource, config: Any) -> nn.Module:
    """Load weights from the folder, in fp32; only an image classifier's head may differ, and then starts anew."""
    try:
        model, loaded = _auto_class(source.task).from_pretrained(
            source.path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=source.task == "image",
            output_loading_info=True,
        )
    except Exception as error:  # a damaged or foreign file shows in many ways
        message = f"{source.path} cannot be loaded: {_first_line(error)}"
        raise ModelError("model-weights", message, "is the download complete, and made for this config?") from error
    for name, saved, wanted in loaded["mismatched_keys"]:
        if wanted[0] != config.num_labels:
            message = f"{source.path} holds {name} of shape {tuple(saved)}, the config asks for {tuple(wanted)}"
            raise ModelError("model-weights", message, "only the number of classes may differ: correct --model-args")
    return model


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
}
