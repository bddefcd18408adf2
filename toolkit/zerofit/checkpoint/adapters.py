"""Adapters on disk, in folders that peft can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zerofit.checkpoint.merge import TrainedPart
from zerofit.checkpoint.model_folder import CARD, ModelInfo, read_model_info
from zerofit.checkpoint.store import CHECKPOINTS, Store
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, ModelSource, find, with_task
from zerofit.models.partial import ADAPTER, head_modules
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.model_facts import has_head
from zerofit.spec.named_code import refuse_foreign_code

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASKS = {"SEQ_CLS": "classify", "TOKEN_CLS": "tag"}  # under the names that peft uses
# settings of peft's LoraConfig that change more than the weights of linear layers
UNMERGED = ("lora_bias", "target_parameters", "trainable_token_indices", "layer_replication")
MERGE = "merge it with peft's merge_and_unload"
PREFIX = "base_model.model."  # prefix of names in peft's files


def write_adapters(folder: Path, model: nn.Module, source: ModelSource, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model's adapters for `PeftModel.from_pretrained`.

    The path of the frozen weights is written, too. `weights` yields the adapters' tensors by their names in `model`.
    The tensors of `model` may be on meta.
    """
    config = peft_config(model)
    # peft finds the frozen weights by this name, so a path must be absolute: a relative path depends on the current
    # folder
    config.base_model_name_or_path = os.path.abspath(source.path) if source.path else source.name
    config.inference_mode = True
    config.modules_to_save = head_modules(model) or None
    names = published_names(model, head_modules(model))
    tensors = {names[name]: tensor.contiguous() for name, tensor in weights}
    assert tensors.keys() == set(names.values()), f"no tensors for {set(names.values()) - tensors.keys()}"
    config.save_pretrained(str(folder))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors makes the file readable only for the owner


def is_adapters(folder: Path) -> bool:
    """Return whether a folder contains adapters, not a full model."""
    return (folder / CONFIG).is_file()


def adapters_of(path: Path) -> Path | None:
    """Return the folder of adapters: `path`, or `model/` in a run without checkpoints, or None."""
    saved = path / "model"
    if is_adapters(path):
        return path
    return saved if is_adapters(saved) and not any(Store(path / CHECKPOINTS).entries()) else None


def read_adapters(folder: Path, trust_model_code: bool = False) -> TrainedPart:
    """Open a folder of adapters written by zerofit or peft. Tensors are read later.

    Raises UserError if they are not LoRA adapters of weights, or if the base model does not exist.
    """
    from peft import LoraConfig, PeftConfig, inject_adapter_in_model

    try:
        config = PeftConfig.from_pretrained(str(folder))
        file = safe_open(folder / WEIGHTS, framework="pt")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        hint = f"it needs peft's {CONFIG} and {WEIGHTS}"
        raise _unreadable(folder, f"cannot be read: {' '.join(str(error).split())[:200]}", hint) from None
    if not isinstance(config, LoraConfig):
        raise _unreadable(folder, f"has {config.peft_type} adapters, not LoRA", MERGE)
    if unmerged := next((key for key in UNMERGED if getattr(config, key, None)), None):
        raise _unreadable(folder, f"has adapters with {unmerged}, which zerofit does not merge", MERGE)
    # The base model is built without memory and gets adapters, as peft would do it. So all names are known and compared
    # with the file before any weight is read.
    config.inference_mode = False  # otherwise peft would freeze the adapters
    # A copy would double these weights and rename them. Here the modules are trained in place instead.
    trained, config.modules_to_save = config.modules_to_save or [], None  # peft would copy these modules
    info = read_model_info(folder)
    source, args = _base_model(folder, config, info)
    refuse_foreign_code(folder / CARD, trust_model_code, model=source.name, model_args=args)
    inputs = info.inputs if info else None
    try:
        with torch.device("meta"):
            model = inject_adapter_in_model(config, build(source, inputs, args), ADAPTER)
    except (ModelError, ValueError) as error:
        hint = "check that the adapters belong to this model"
        raise _unreadable(folder, f"does not match {source.name}: {error}", hint) from None
    # peft compares only the ends of names: "norm" also matches "input_layernorm" (utils/other.py, `_set_trainable`)
    saved = [*head_modules(model), *(name for name, _ in model.named_modules() if name.endswith(tuple(trained)))]
    for name in saved:
        model.get_submodule(name).requires_grad_(True)
    names = published_names(model, saved)
    missing = set(names.values()) ^ set(file.keys())
    if missing:
        what, hint = f"does not match {source.name}: only one of them has {min(missing)}", "use peft's merge_and_unload"
        raise _unreadable(folder, what, hint)
    return TrainedPart(
        source=source,
        inputs=inputs,
        model_args=args,
        seed=info.seed if info else 0,
        dtype=getattr(torch, info.frozen.dtype) if info and info.frozen else torch.float32,
        model=model,
        read=lambda name: file.get_tensor(names[name]),
        names=frozenset(names),
        frozen=info.frozen if info else None,
    )


def _base_model(folder: Path, config: LoraConfig, info: ModelInfo | None) -> tuple[ModelSource, dict[str, object]]:
    name, args = config.base_model_name_or_path or "", dict(info.model_args) if info else {}
    try:
        source = find(name if Path(name).is_dir() or info is None else info.model)
        kind = getattr(config.task_type, "value", config.task_type)  # an enum member or a string
        task = info.task if info and has_head(info.task) else TASKS.get(kind or "")
        return replace(with_task(source, task), pretrained=info.pretrained if info else None), args
    except ModelError as error:
        hint = f"put the model there, or set base_model_name_or_path in {folder / CONFIG} to its folder"
        raise _unreadable(folder, f"needs a base model that is not here: {error.message}", hint) from None


def _unreadable(folder: Path, what: str, hint: str) -> UserError:
    return UserError(Problem(kind="adapters", message=f"{folder} {what}", hint=hint, where=str(folder)))


def published_names(model: nn.Module, saved: list[str]) -> dict[str, str]:
    """Return the names in peft's files for the trained parameters of a model with adapters.

    `saved` are the modules that are trained without adapters: the head, and peft's `modules_to_save`.
    """
    from peft import get_peft_model_state_dict

    # peft's naming is only available through its state_dict function. It gets empty marks under our names; the place of
    # each mark in its result is peft's name.
    marks = {name: nn.Parameter() for name, p in model.named_parameters() if p.requires_grad}
    # With the default "auto", peft may look for the base model's config on the hub (utils/save_and_load.py).
    state = get_peft_model_state_dict(model, marks, ADAPTER, save_embedding_layers=False)
    names = {id(mark): name for name, mark in marks.items()}
    saved_prefixes = tuple(f"{name}." for name in saved)
    published = {name: PREFIX + name for name in marks if name.startswith(saved_prefixes)}
    return published | {names[id(mark)]: PREFIX + name for name, mark in state.items()}


def peft_config(model: nn.Module) -> LoraConfig:
    """Return peft's configuration of a model with adapters."""
    return cast("LoraConfig", cast("PeftModel", model).peft_config[ADAPTER])
