"""Find what a model name means.

It is zerofit's or torchvision's model, a preset, a file or folder, or a callable. Importing this module does not import
torch, torchvision or transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import BaseModel, ValidationError

from zerofit.models.names import Match, preset_of, relatives
from zerofit.models.presets import NAMED, PRESETS, Config
from zerofit.spec.errors import ModelError
from zerofit.spec.files import stays_inside
from zerofit.spec.foreign import CONVERSIONS, Unreadable, read_json
from zerofit.spec.model_facts import Task
from zerofit.spec.named_code import names_callable
from zerofit.spec.partial_training import PartialTraining

if TYPE_CHECKING:
    from zerofit.spec.run import Run


Family = Literal["zerofit", "torchvision", "transformers", "diffusers", "gan", "custom"]

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
PRETRAINED = "pretrained folder"
FEW, LISTED = 3, 12  # limits of names in an error: close names, and names of a family
QUANTIZED = "quantization_config"  # key of a config whose weights are quantized
DEQUANTIZED = ("fp8", "mxfp4")  # methods whose weights transformers dequantizes on loading


CONFIG_HINT = "give a config.json of transformers"
INDEX = ".index.json"  # suffix of an index of shards
# in transformers' order of preference
NAMES = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)


# The config's class checks all other keys, but it is known only after these are read.
class _ConfigKeys(BaseModel, frozen=True, protected_namespaces=()):
    """Keys of a transformers config that are read here."""

    model_type: str
    architectures: list[str] | None = None
    id2label: dict[int, object] | None = None
    is_decoder: bool | None = None
    is_encoder_decoder: bool | None = None
    quantization_config: Config | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The origin of a model that is not built yet."""

    name: str  # as the user typed it
    family: Family
    origin: str  # "zerofit", "torchvision", "preset", "config.json", "pretrained folder", "package.module:callable"
    task: Task | Literal["custom"]  # of a custom model: only known after it is built
    path: str | None = None  # the config.json, or the pretrained folder
    partial: PartialTraining | None = None  # the trained part; None: all of it
    pretrained: str | None = None  # file or folder of initial weights, if it is not `path`


def source_of(run: Run) -> ModelSource:
    """Return the source of a run's model, with adapters and frozen weights.

    Raises ModelError if the weights are unusable, or if `find` or `with_task` raises it.
    """
    pretrained = str(run.pretrained.expanduser()) if run.pretrained else None
    source = with_task(find(run.model), run.task)
    quantized = source_config(source).get(QUANTIZED) if source.origin == PRETRAINED else None
    if quantized and quantized.get("quant_method") not in DEQUANTIZED:
        message = f"{source.name}: quantized weights ({quantized.get('quant_method')}) cannot be trained"
        hint = "use the folder of the full weights (--quantize quantizes them for adapters); to forecast memory and "
        raise ModelError("model-weights", message, f"{hint}time {source.name}/config.json is enough")
    return replace(source, partial=run.partial, pretrained=pretrained)


# `--task` puts a classifier's or tagger's head on a language model. transformers' tables list the models with such
# heads; they are read without building anything.
def with_task(source: ModelSource, task: str | None) -> ModelSource:
    """Return a model's source with the run's `task`. If `task` is None, keep the config's task.

    Raises ModelError("model-task") if transformers has no such head for the model.
    """
    if task is None or task == source.task or (task == "seq2seq" and source.task == "seq2seq-lm"):
        return source
    if source.family != "transformers":
        message = f"--task {task} is only for transformers models, and {source.name} is not one"
        raise ModelError("model-task", message, "use a preset, a config.json or a pretrained folder")
    model_type = source_config(source)["model_type"]
    if task == "seq2seq":
        message = f"--task seq2seq: {source.name} ({model_type}) has no encoder and decoder"
        raise ModelError("model-task", message, "use an encoder-decoder such as T5 or BART")
    from transformers.models.auto import modeling_auto as auto

    known = getattr(auto, HEADS[cast(Task, task)])
    if model_type not in known or source.task == "seq2seq-lm":
        fitting = [name for name in ("bert", "roberta", "distilbert", "gpt2", "llama", "qwen2") if name in known]
        what = "is an encoder-decoder" if source.task == "seq2seq-lm" else "has no such head in transformers"
        message = f"--task {task}: {source.name} ({model_type}) {what}"
        raise ModelError("model-task", message, f"use an encoder or a decoder: {', '.join(fitting)} or others")
    return replace(source, task=cast(Task, task))


def label_names(source: ModelSource) -> tuple[str, ...]:
    """Return the class names of a pretrained transformers model's head in order, or ()."""
    if source.family != "transformers" or source.origin != PRETRAINED:
        return ()
    named = source_config(source).get("id2label") or {}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def source_config(source: ModelSource) -> Config:
    """Return the published config of a transformers model."""
    if source.origin == "preset":
        return PRESETS[source.name]
    path = Path(source.path or "")
    return read_config(path / "config.json" if path.is_dir() else path)


def find(name: str) -> ModelSource:
    """Return the source for a name. Raises ModelError "unknown-model" or "model-config"."""
    if name in NAMED:
        preset = NAMED[name]
        family = "gan" if preset.kind == "gan" else preset.library
        return ModelSource(name=name, family=family, origin=preset.origin, task=preset.kind)
    path = Path(name)
    if path.exists():
        return _from_path(name, path)
    if name.startswith("hub:"):
        message = f"{name}: only training supports names that begin with hub:"
        raise ModelError("unknown-model", message, "give the folder of its snapshot in the hub's cache")
    if names_callable(name):
        return ModelSource(name=name, family="custom", origin="package.module:callable", task="custom")
    raise ModelError("unknown-model", *_unknown(name))


def shape_named(name: str) -> Match:
    """Return a preset or a cached config.json with the shape of a hub repository's model.

    `name` may also be another spelling of a preset's name. All other names are returned unchanged. The result is only
    for forecasts of memory and time, which need no weights. Training "Qwen/Qwen3-8B" needs the repository's weights.
    """
    name = name.removeprefix("hub:")
    unchanged = Match(name=name, note="")
    if name in NAMED or Path(name).exists() or name.endswith(".json") or names_callable(name):
        return unchanged
    preset = preset_of(name)
    if name.count("/") == 1 and (preset is None or preset.note):  # the repository's config is better than its name
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Match(name=cached, note="")
    return preset or unchanged


def is_cnn(source: ModelSource) -> bool:
    """Return whether a model is a convolutional network of zerofit or torchvision."""
    return source.name in NAMED and NAMED[source.name].convolutional


# The task of a config.json, from the surest to the vaguest:
#
# 1. the ending of its architecture ("LlamaForCausalLM"),
# 2. a model type that computes its own loss (Whisper, CLIP, LLaVA, encoder-decoders),
# 3. transformers' table that contains the architecture,
# 4. the model type alone: a config without a head in "architectures", as people write it by hand.
def config_task(config: Config, where: str) -> Task:
    """Return the task of a transformers config, by its architecture, else by its model_type."""
    architecture: str | None = (config.get("architectures") or [None])[0]
    name, model_type = architecture or "", config.get("model_type")
    by_ending: Task | None = next((t for ending, t in ARCHITECTURE_ENDINGS.items() if name.endswith(ending)), None)
    if by_ending and not name.endswith("WithLMHeadModel"):  # Flaubert's is masked
        return by_ending
    # encoder-decoders come first, since BART's class is also among the masked models
    task = _own_loss_task(config, architecture) or _task_of_class(architecture, model_type) or by_ending
    if task is None and not OTHER_HEAD.search(name):
        task = _task_of_model_type(model_type, bool(config.get("is_decoder")))
    _refuse_lone_decoder(config, where, task)
    if task is None:
        got = f"architectures {config.get('architectures')}, model_type {config.get('model_type')!r}"
        message = f"{where}: {got} is not supported; supported: language models (causal, masked, encoder-decoder), "
        message += "image classifiers, speech recognizers like Whisper, and models like CLIP and LLaVA"
        hint = 'set "architectures" in the config, e.g. ["LlamaForCausalLM"], pass package.module:callable, or '
        hint += "simulate your training script (zerofit simulate -- COMMAND)"
        raise ModelError("model-config", message, hint)
    return task


def _task_of_class(name: str | None, model_type: str | None) -> Task | None:
    """Return the task whose table in transformers lists the class `name` for the model type."""
    from transformers.models.auto import modeling_auto as auto

    for task, table in CLASS_TABLES.items():
        known = getattr(auto, table).get(model_type, ())
        if name in ([known] if isinstance(known, str) else known):
            return task
    return None


# transformers loads an encoder-decoder as a causal model without an error, but then only half of the model is trained.
def _refuse_lone_decoder(config: Config, where: str, task: Task | None) -> None:
    """Raise ModelError if transformers would build only the decoder of an encoder-decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    architecture = (config.get("architectures") or [""])[0]
    decoder = DECODERS.get(config.get("model_type"))
    if task != "causal-lm" or not architecture.endswith("ForConditionalGeneration"):
        return
    if decoder in (None, architecture):
        return
    message = f"{where}: as a causal language model, {architecture} would lose its encoder: only {decoder} is built"
    hint = f'simulate your training script (zerofit simulate -- COMMAND), or set "architectures" to ["{decoder}"]'
    raise ModelError("model-config", message, hint)


def _own_loss_task(config: Config, architecture: str | None) -> Task | None:
    """Return the task of a model that returns its own loss; None for other models and heads."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    model_type = config.get("model_type")
    task = NAMED_TASKS.get(model_type or "")
    if task is None and model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        default = CONFIG_MAPPING[model_type]().is_encoder_decoder  # the type's
        task = "seq2seq-lm" if config.get("is_encoder_decoder", default) else None
    if task is None:
        return None
    full_class = getattr(auto, HEADS[task])[model_type]
    return task if architecture in (None, full_class, auto.MODEL_MAPPING_NAMES.get(model_type)) else None


def _task_of_model_type(model_type: str | None, is_decoder: bool) -> Task | None:
    from transformers.models.auto import modeling_auto

    if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        return "masked-lm"
    if model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "causal-lm"
    if model_type in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image"
    return None


def _from_path(name: str, path: Path) -> ModelSource:
    if (path / "model_index.json").is_file():  # a diffusers pipeline: its denoiser is trained
        path = next((path / part for part in ("unet", "transformer") if (path / part).is_dir()), path)
    file = path / "config.json" if path.is_dir() else path
    config = read_config(file)
    if "model_type" not in config:
        return ModelSource(name=name, family="diffusers", origin="config.json", task="denoising", path=str(file))
    pretrained = path.is_dir() and any(next(path.glob(pattern), None) for pattern in WEIGHTS)
    try:
        if pretrained:
            weight_names(path)  # checked here, since transformers reads any file that an index names
    except Unreadable as error:
        raise ModelError("model-weights", f"{path}: {error.reason}", "is the download complete?") from None
    return ModelSource(
        name=name,
        family="transformers",
        origin=PRETRAINED if pretrained else "config.json",
        task=config_task(config, str(file)),
        path=str(path if pretrained else file),
    )


def read_config(file: Path) -> Config:
    """Read a config.json of transformers or of a diffusers denoiser. Raises ModelError."""
    if not file.is_file():
        # Only in a folder that the user names: a model's name alone has the current folder as its parent.
        seen = file.parent.glob("*") if file.name == "config.json" else ()
        hint = _conversion(*seen) or "give a folder with config.json, or a model from `zerofit models`"
        if (file.parent / "run.json").is_file():
            hint = f"for a run folder use {file.parent}/model (its weights) or {file.parent}/run.json (the run)"
        if (file.parent / "adapter_config.json").is_file():
            hint = f"it has adapters; `zerofit ckpt export {file.parent} OUT --merge` writes the full model"
        if snapshots := sorted(file.parent.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime):
            hint = f"it is a folder of the hub's cache: use {snapshots[-1].parent}"
        raise ModelError("unknown-model", f"{file.parent} has no config.json", hint)
    try:
        config = read_json(file)
    except OSError as error:
        raise ModelError("model-config", f"cannot read {file}: {error.strerror or error}", CONFIG_HINT) from None
    except Unreadable as error:
        hint = _conversion(file) or CONFIG_HINT
        raise ModelError("model-config", f"{file} is not a model config: {error}", hint) from None
    if "_class_name" in config and "model_type" not in config:
        if config["_class_name"] not in DENOISERS:
            message = f"{file} is for diffusers' {config['_class_name']}; supported: {', '.join(DENOISERS)}"
            hint = "simulate your training script (zerofit simulate -- COMMAND)"
            raise ModelError("model-config", message, hint)
        return config
    if "model_type" not in config:
        message = f'{file} is not a config.json of transformers: it has no "model_type"'
        hint = _conversion(file) or 'e.g. {"model_type": "llama", "hidden_size": 512}'
        raise ModelError("model-config", message, hint)
    try:
        _ConfigKeys.model_validate(config)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))} is {e['input']!r:.60}: {e['msg']}" for e in error.errors()]
        raise ModelError("model-config", f"{file}: {'; '.join(wrong)}", CONFIG_HINT) from None
    return config


def _conversion(*files: Path) -> str:
    """Return how to convert the first of these files that has another program's format; "" if none has."""
    return next((hint for file in files for name, hint in CONVERSIONS.items() if file.match(name)), "")


def _unknown(name: str) -> tuple[str, str]:
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        return f"model file or folder {name} does not exist", "give an existing config.json or model folder"
    message = f"unknown model {name!r}: not in `zerofit models`, not a file or folder, not a package.module:callable"
    preset = preset_of(name)
    known = [preset.name] if preset else relatives(name)
    others = f" and {len(known) - LISTED} others (`zerofit models WORD`)" if len(known) > LISTED else ""
    hint = f"known in that family: {', '.join(known[:LISTED])}{others}"
    if len(known) <= FEW:
        hint = f"did you mean {' or '.join(known)}?" if known else "`zerofit models` lists all names"
    if "/" in name:
        hint = f"use hub:{name} to download a model, or give its folder; {hint}"
    return message, hint


CLASS_TABLES: dict[Task, str] = {  # transformers' tables of classes, by model type (models/auto/modeling_auto.py)
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
ARCHITECTURE_ENDINGS: dict[str, Task] = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForImageClassification": "image",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
}
# a head with another task, e.g. SegformerForSemanticSegmentation
OTHER_HEAD = re.compile(r"For(?!PreTraining$|ConditionalGeneration$)[A-Z]\w*$")


# model types other than encoder-decoders of text; `models.named_inputs` defines their inputs
NAMED_TASKS: dict[str, Task] = {
    "whisper": "speech",
    "clip": "image-text-pairs",
    "siglip": "image-text-pairs",
    "llava": "image-text",
    "qwen2_vl": "image-text",
    "qwen2_5_vl": "image-text",
    "qwen3_vl": "image-text",
}

# diffusers' classes; `models.denoisers` defines their inputs
DENOISERS = ("UNet2DConditionModel", "DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel")

HEADS: dict[Task, str] = {  # transformers' tables of full models, by model type (models/auto/modeling_auto.py)
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-text-pairs": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tag": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}


def weight_names(folder: Path) -> list[str]:
    """Return the names of a folder's weight files, from the index if it has one.

    Returns [] if there are no weights. Shards may be missing. Raises Unreadable for a bad index, and for a file outside
    the folder.
    """
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    names = [name] if name else []
    if name and name.endswith(INDEX):
        try:
            files = read_json(folder / name).get("weight_map")
        except OSError as error:
            raise Unreadable(f"it cannot be read: {error.strerror}") from None
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise Unreadable("it is not an index of shards: weight_map must map each tensor to a file name")
        names = sorted(set(files.values()))
    for file in names:
        if not stays_inside(file) or not _is_inside(folder, file):
            raise Unreadable(f"{file!r} is outside the folder; copy it there, or link the entire folder")
    return names


def _is_inside(folder: Path, name: str) -> bool:
    """Return whether a file is in its folder after links are followed.

    In the hub's cache, files in REPOSITORY/snapshots/REVISION are links to REPOSITORY/blobs. These count as inside.
    """
    home = folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return any((folder / name).resolve().is_relative_to(path) for path in homes)
