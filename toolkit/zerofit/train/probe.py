"""Read facts about a model on the meta device, without memory and without a download."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import nn

from zerofit.models.build import build, check_forward, parameter_count, refuse_lazy
from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.depth import of_all_layers
from zerofit.models.hf_config import EXPERTS
from zerofit.models.inputs import ImageInputs, Inputs, are_packed
from zerofit.models.layers import as_layers, layer_facts
from zerofit.models.quantized import quantized_share, without_bits
from zerofit.models.without_dynamo import without_dynamo
from zerofit.spec.errors import Problem, UserError, models_say
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.model_facts import ModelFacts, Task, width
from zerofit.spec.run import Run

TABLES = ("csv:", "npy:")  # data sources for table models only


def probe(
    source: ModelSource,
    task: Task,
    inputs: Inputs | None,
    args: dict[str, object],
    pipelined: bool,
    model: nn.Module | None = None,
) -> ModelFacts:
    """Return the facts about a model for these inputs. Without inputs, FLOPs are not counted.

    `args`: the run's `model_args`. `pipelined`: whether the list of layers is needed. `model`: an existing model to
    use instead of building it from the source. Raises UserError if model and data do not match.
    """
    with models_say("MODEL"), without_dynamo():
        if model is None:
            # bitsandbytes cannot quantize on meta, so the model is built without bits, and again only to count them
            with torch.device("meta"):
                model = build(without_bits(source), inputs, args)
                bits = quantized_share(build(source, inputs, args)) if source != without_bits(source) else (0, 0)
        else:
            refuse_lazy(model, source.name)
            bits = (0, 0)
        flops = None if source.family == "custom" or inputs is None else check_forward(model, source, inputs)
        try:
            stack = layer_facts(as_layers(model))
        except ModelError:  # the model is no sequence of layers
            if pipelined:
                raise
            stack = None
    config = getattr(model, "config", None)
    heads = of_all_layers(config, "num_attention_heads")
    text_config = getattr(config, "text_config", None)  # of a model for images and text
    hidden_size = of_all_layers(config, "hidden_size") or of_all_layers(text_config, "hidden_size")
    largest = max((p.numel() for p in model.parameters()), default=0)
    if not largest:
        message = f"{source.name} has no parameters to train"
        raise UserError(Problem(kind="model-empty", message=message, where="MODEL"))
    return ModelFacts(
        task=task,
        parameters=parameter_count(model),
        largest_parameter=largest,
        hidden_size=width(hidden_size, largest),
        forward_flops=flops,
        attention_heads=heads,
        kv_heads=of_all_layers(config, "num_key_value_heads") or heads,
        experts=expert_count(config),
        expert_lists=expert_lists(model),
        model_type=getattr(config, "model_type", None),
        layers=None if stack is None else len(stack),
        stack=stack if stack and pipelined else (),
        own=source.family == "custom",
        trained=trained_count(model),
        packed=are_packed(inputs),
        quantized=bits[0],
        quantized_bytes=bits[1],
    )


def check_sizes(source: ModelSource, inputs: ImageInputs, run: Run) -> None:
    """Raise UserError if a model for the last of `--image-sizes` does not support the others."""
    if run.image_sizes is None or source.family == "custom":
        return
    with models_say("--image-sizes"), without_dynamo():
        with torch.device("meta"):
            model = build(source, inputs, dict(run.model_args))
        for size in ImageSizes.parse(run.image_sizes).sizes[:-1]:
            check_forward(model, source, replace(inputs, size=size))


def expert_count(config: object) -> int | None:
    """Return the experts in each layer of a transformers model; None without a mixture."""
    return next((n for name in EXPERTS if isinstance(n := of_all_layers(config, name), int)), None)


def are_experts(name: str, child: nn.Module) -> bool:
    """Return whether a module's child is a list of experts, each a module with its own weights."""
    return "expert" in name.lower() and isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) > 1


def expert_lists(model: nn.Module) -> tuple[str, ...]:
    """Return the classes that have a list of experts, as module.Class."""
    owners = (m for m in model.modules() if any(are_experts(*child) for child in m.named_children()))
    return tuple({f"{type(m).__module__}.{type(m).__qualname__}": None for m in owners})


def trained_count(model: nn.Module) -> int | None:
    """Count the trained parameters; None if all are trained."""
    if all(p.requires_grad for p in model.parameters()):
        return None
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def task_of(source: ModelSource, run: Run) -> Task:
    """Return the task of a model. A user's own model gets its task from `fed_with`."""
    if source.task != "custom":
        return source.task
    with models_say("MODEL"), torch.device("meta"):
        return fed_with(build(source, None, dict(run.model_args)), run)


def fed_with(model: nn.Module, run: Run) -> Task:
    """Return the task of a user's own model, by the arguments of its forward and the run's data."""
    if "input_ids" in inspect.signature(model.forward).parameters:
        return "causal-lm"
    if (run.data or "").startswith("segmentation:"):
        return "segmentation"
    return "table" if (run.data or "").startswith(TABLES) else "image"
