"""Train a part of a model: peft's adapters, or parameters chosen by patterns."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from zerofit.models.catalog import ModelError
from zerofit.spec.errors import nearest, reason_of
from zerofit.spec.partial_training import LoraSettings, PartialTraining

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name of the only adapter
ALL_LINEAR = "all-linear"
TASK_TYPES = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}  # peft's, by class
BASE = ".base_layer"  # added by peft to the names of weights with adapters

# On CPUs with AVX-512, bitsandbytes warns while it is imported if an optional package of kernels is missing. peft and
# transformers import it on their own, often before any function here runs, so the logger is set on import.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def train_part(model: nn.Module, partial: PartialTraining) -> nn.Module:
    """Freeze all parameters of a built model except the trained part, and add adapters.

    Changes the model in place. Adapters are initialized on the CPU in float32, in the order of modules. The values are
    those of peft after `torch.manual_seed` with the run's seed. So the numbers do not depend on this rank's part of the
    model. Weights on meta get adapters, too. Raises ModelError if nothing would be trained, or for names that the model
    does not have.
    """
    if partial.lora is not None:
        torch.manual_seed(partial.seed)
        return _with_adapters(model, partial.lora)
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in (*partial.train, *partial.freeze):
        if not any(_matches(name, pattern) for name in names):
            modules = {name.rpartition(".")[0] for name in names}
            hint = nearest(pattern, modules) or "use a shell pattern of full names, e.g. " + ", ".join(list(names)[:2])
            raise ModelError("model-part", f"no parameter or module of the model matches {pattern!r}", hint)
    trained = {
        id(parameter)
        for name, parameter in names.items()
        if not partial.train or any(_matches(name, pattern) for pattern in partial.train)
    }
    # Parameters are compared by identity: a tied weight is frozen under all of its names if it is frozen under one.
    trained -= {id(p) for name, p in names.items() if any(_matches(name, pattern) for pattern in partial.freeze)}
    for parameter in names.values():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ModelError("model-part", "all parameters of the model are frozen", "leave some to be trained")
    return model


# In simulations and profiles a few layers represent many. This is wrong if only some of the layers are trained.
def differ_by_layer(partial: PartialTraining | None, layers: int) -> bool:
    """Return whether the patterns select only some of a model's layers, by their numbers.

    A model with fewer layers would then be trained differently.
    """
    patterns = () if partial is None else (*partial.train, *partial.freeze)
    words = {word for pattern in patterns for word in pattern.split(".")}
    return any(len({fnmatchcase(str(layer), word) for layer in range(layers)}) > 1 for word in words)


def lora_config(model: nn.Module, lora: LoraSettings) -> LoraConfig:
    """Return peft's configuration of these adapters for a model without adapters."""
    from peft import LoraConfig

    targets: str | list[str] = _target_names(lora)
    if targets == [ALL_LINEAR]:
        targets = _linear_layers(model)
    name = type(model).__name__
    return LoraConfig(
        task_type=next((kind for ending, kind in TASK_TYPES.items() if name.endswith(ending)), None),
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        init_lora_weights=True if lora.init == "default" else lora.init,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
    )


def head_modules(model: nn.Module) -> list[str]:
    """Return the modules of a text classifier's head, or [] for other models.

    The head is new or has different classes, so it is trained together with the adapters, as in peft.
    """
    if not type(model).__name__.endswith(tuple(TASK_TYPES)):
        return []
    body = cast("PreTrainedModel", model).base_model_prefix
    return [name for name, child in model.named_children() if name != body and list(child.parameters())]


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield (name, layer) of a model's layers with adapters."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def name_without_adapters(name: str) -> str:
    """Return a frozen weight's name in the model without adapters."""
    return name.replace(BASE, "")


def _with_adapters(model: nn.Module, lora: LoraSettings) -> nn.Module:
    from peft import inject_adapter_in_model

    parameters = list(model.parameters())
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hint = f"layers are named {', '.join(sorted(names))}" if names else "give names of layers"
    config = lora_config(model, lora)
    try:
        with warnings.catch_warnings(), torch.device("meta" if all(p.is_meta for p in parameters) else "cpu"):
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # peft corrects it itself
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        message = f"--lora-targets {lora.targets}: {reason_of(error)}"
        raise ModelError("model-part", message, hint) from None
    _refuse_targets(model, lora, hint)
    _refuse_shared(model)
    for name in head_modules(model):
        model.get_submodule(name).requires_grad_(True)
    return model


def _linear_layers(model: nn.Module) -> str | list[str]:
    """Return the adapter targets for all linear layers.

    They are peft's keyword, or a list of the layers' names. The list is for models in which peft's own search is not
    usable. The search supports only transformers models. In a mixture it would include the fused experts and the
    router.
    """
    head = head_modules(model)
    if head:
        from transformers.pytorch_utils import Conv1D  # GPT-2's

        kinds, modules = (nn.Linear, Conv1D), model.named_modules()
        return [n for n, module in modules if isinstance(module, kinds) and n.partition(".")[0] not in head]
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not hasattr(model, "get_output_embeddings"):
        return list(linear)
    if not any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters()):
        return ALL_LINEAR
    head_layer = cast("PreTrainedModel", model).get_output_embeddings()
    return [name for name, module in linear.items() if module is not head_layer]


def _target_names(lora: LoraSettings) -> list[str]:
    return [name.strip() for name in lora.targets.split(",") if name.strip()]


def _refuse_targets(model: nn.Module, lora: LoraSettings, hint: str) -> None:
    """Raise ModelError if a target is no linear layer of the model, or has fused experts.

    In every forward, peft would add the full adapter matrix to the full tensor of fused experts.
    """
    from peft.tuners.lora import ParamWrapper

    adapted = dict(lora_layers(model))
    linear = {name for name, layer in adapted.items() if not isinstance(layer, ParamWrapper)}
    wrapped = next((name for name in adapted if name not in linear), None)
    if wrapped is not None:
        usable = ",".join(sorted({name.rpartition(".")[2] for name in linear})) or "NAME (of linear layers)"
        message = f"--lora-targets {lora.targets}: {wrapped} is not a linear layer, and its adapters cannot be trained"
        raise ModelError("model-part", message, f"use --lora-targets {usable}")
    for name in _target_names(lora):
        if name != ALL_LINEAR and not any(layer == name or layer.endswith(f".{name}") for layer in linear):
            message = f"--lora-targets {lora.targets}: no linear layer of the model is named {name}"
            raise ModelError("model-part", message, hint)


# Merging would change both layers. GPT-2's output matrix is its embedding.
def _refuse_shared(model: nn.Module) -> None:
    """Raise ModelError for an adapter of a weight that two layers share."""
    adapted = {id(p): name for name, layer in lora_layers(model) for p in layer.get_base_layer().parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        adapter = adapted.get(id(parameter))
        if adapter is not None and not name.startswith(f"{adapter}."):
            message = f"{adapter} shares its weight with {name.rpartition('.')[0]} and cannot have an adapter"
            raise ModelError("model-part", message, "leave it out of --lora-targets")


def _matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a parameter, or a module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
