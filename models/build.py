"""Building models for their inputs, checking that they fit, and calling every model in one way."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.checkpointing import checkpoint_model
from zerofit.models.deferred import NotDeferrableError, Stored, build_deferred, store_parameters, why_not_deferrable
from zerofit.models.denoisers import denoiser, denoising_loss, is_denoiser
from zerofit.models.hf import IN_FP32, transformers_model
from zerofit.models.hf_config import make_config, max_positions
from zerofit.models.image_grids import grid_arguments
from zerofit.models.inputs import (
    ImageInputs,
    Inputs,
    LabelledTextInputs,
    NamedInput,
    NamedInputs,
    SegmentationInputs,
    TableInputs,
    TextInputs,
    are_packed,
    tensors_of,
)
from zerofit.models.layer_drop import EveryLayer
from zerofit.models.packing import refuse_unseparated
from zerofit.models.partial import name_without_adapters, train_part
from zerofit.models.pretrained import load_pretrained
from zerofit.models.quantized import Quantizer, elements
from zerofit.models.state_space import mamba_kernels
from zerofit.models.vision import BUILDERS, DCGAN, PUBLISHED_INPUTS, torchvision_model
from zerofit.spec.errors import reason_of
from zerofit.spec.model_facts import gives_loss, has_head, is_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED = 2  # samples of a trial: one may be computed otherwise
# transformers compares the number of images with their places in a text: without values there is nothing to compare
UNCHECKED = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}
# of a forward that gives a loss, where it has them
_LOSS_OPTIONS = {"use_cache": False, "return_loss": True}


def build(
    source: ModelSource,
    inputs: Inputs | None,
    args: dict[str, Any],
    *,
    checkpointing: bool = False,
    stored: Stored | None = None,
    keep: set[str] | None = None,
) -> nn.Module:
    """Build the model in fp32 on the current default device (also meta), fitted to its inputs.

    What is not trained (`source.partial`) is frozen, and adapters are added.

    Weights are random, drawn from torch's global stream, or a pretrained folder's. `args` override the keys of a
    transformers config, or are keyword arguments of other models. Without inputs a model has its published shape.
    `stored`: cast and move each parameter as soon as it has its values (a user's model that cannot be deferred: after
    it was built, see `why_whole`), so that beside what is stored memory is needed for a layer. `keep`: names of the
    parameters that are stored (None: all); the others are on meta.
    """
    _refuse_inputs(source, inputs)
    if inputs is not None and source.task != "custom" and gives_loss(source.task) != isinstance(inputs, NamedInputs):
        message = f"{source.name} ({source.task}) is fed other tensors than the data has"
        raise ModelError("model-task", message, "take --data synthetic")
    make = partial(BUILD[source.family], source, inputs, dict(args))
    keep = keep if keep is None else {name_without_adapters(name) for name in keep}
    quantization, quantizer = source.partial and source.partial.quantization, None
    if quantization:
        quantizer = Quantizer(quantization, source, make, stored or IN_FP32)
        stored = quantizer.stored
    if stored is None:
        model = make()
    elif source.family == "transformers":
        model = make(stored=stored, keep=keep)
    else:
        try:
            model = build_deferred(make, stored, keep)
        except NotDeferrableError:
            model = store_parameters(make(), stored, keep)
    if source.pretrained:
        load_pretrained(model, source, inputs)
    if quantizer:
        quantizer.put_into(model)
    if checkpointing:
        _checkpoint(model)
    return model if source.partial is None else train_part(model, source.partial)


def _refuse_inputs(source: ModelSource, inputs: Inputs | None) -> None:
    """Raise ModelError("model-task") for inputs of another kind than the model takes."""
    held = {
        ImageInputs: "images",
        SegmentationInputs: "images with masks",
        TableInputs: "a table",
        TextInputs: "text",
        LabelledTextInputs: "text with labels",
    }
    got = held.get(type(inputs))
    for taken, does, fits in (
        (ImageInputs, "classifies images", source.task in ("image", "gan")),
        (SegmentationInputs, "classifies pixels", source.task == "segmentation"),
        (TableInputs, "classifies rows of a table", source.task == "table"),
        (LabelledTextInputs, "labels text", has_head(source.task)),
        (TextInputs, "reads text", is_text(source.task) and not has_head(source.task)),
    ):
        if fits and got and type(inputs) is not taken:
            raise ModelError("model-task", f"{source.name} {does}, the data is {got}", "take other --data")


def why_whole(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]) -> str | None:
    """Return why a model cannot be built parameter by parameter; None where it can. Takes no memory."""
    if source.family == "transformers":
        return None
    return why_not_deferrable(partial(BUILD[source.family], source, inputs, dict(args)))


def forward_logits(model: nn.Module, x: Tensor, **extra: Any) -> tuple[Tensor, Tensor | None]:
    """Return logits of token ids (batch, seq_len) or images (batch, channels, size, size), and a router's loss.

    The model may sit in a wrapper with its attribute `module`, such as a DeepSpeed engine; the wrapper is called. The
    second value is coefficient * load balancing loss of a mixture of experts in training, else None. `extra` goes to
    the model as it is (position_ids under sequence parallelism).
    """
    inner = getattr(model, "module", model)
    inner = getattr(inner, "_orig_mod", inner)  # torch.compile's wrapper has another signature
    if not hasattr(inner, "main_input_name"):
        out = model(x, **extra)
        out = out["out"] if isinstance(out, dict) and "out" in out else out  # torchvision's segmentation models
        return cast(Tensor, getattr(out, "logits", out)), None
    if inner.main_input_name == "pixel_values":
        return _logits_of(model(pixel_values=x, **extra)), None
    if "use_cache" in _arguments(type(inner)) | _arguments(type(inner.base_model)):  # Granite's head hands it on
        extra["use_cache"] = False
    out = model(input_ids=x, **extra)
    aux = getattr(out, "aux_loss", None)
    if aux is None or not inner.training:
        return _logits_of(out), None
    return _logits_of(out), cast("PreTrainedModel", inner).config.router_aux_loss_coef * aux


def _logits_of(out: Any) -> Tensor:
    if getattr(out, "logits", None) is None:
        raise ModelError("model-shape", f"transformers gives {type(out).__name__} without logits for this model")
    return out.logits


def forward_loss(model: nn.Module, inputs: NamedInputs, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that a transformers model gives for a batch of named inputs, or a denoiser's against noise.

    The model may sit in a wrapper with its attribute `module`, such as a DeepSpeed engine; the wrapper is called.
    """
    return forward_named(model, inputs, batch).loss


def forward_named(model: nn.Module, inputs: NamedInputs, batch: Mapping[str, Tensor]) -> Any:
    """Return the loss and logits that `forward_loss` takes its loss of."""
    inner = getattr(model, "module", model)
    inner = getattr(inner, "_orig_mod", inner)
    named = {one.name: batch[key] for key, one in zip(batch_keys(inputs), inputs.tensors, strict=True)}
    if is_denoiser(inner):
        return SimpleNamespace(loss=denoising_loss(model, named), logits=None)
    for one in inputs.tensors:
        if one.name == "pixel_values" and one.image:
            named |= grid_arguments(inner, inputs, named)
    extra = {name: value for name, value in _LOSS_OPTIONS.items() if name in _arguments(type(inner))}
    return model(**named, **extra)


def batch_keys(inputs: Inputs) -> list[str]:
    """Return what a batch calls the tensors of its samples: "inputs", their own names, "labels"."""
    return ["inputs", *(one.name for one in tensors_of(inputs)[1:-1]), "labels"]


def extra_inputs(inputs: Inputs | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a batch a model takes beside its "inputs", by the names of its forward's arguments."""
    return {key: batch[key] for key in batch_keys(inputs)[1:-1]} if inputs is not None else {}


def empty_batch(inputs: Inputs, count: int, make: Callable[..., Tensor] = torch.zeros) -> dict[str, Tensor]:
    """Return a batch of `count` samples without data, on the current default device, as loaders name its tensors.

    float32, and int64 of ids; what samples always begin with is there.
    """
    return {key: _empty(one, count, make) for key, one in zip(batch_keys(inputs), tensors_of(inputs), strict=True)}


def _empty(one: NamedInput, count: int, make: Callable[..., Tensor]) -> Tensor:
    made = make(count, *one.shape, dtype=torch.float32 if one.ids is None else torch.long)
    if one.first is not None:
        made[:, : one.first[1]] = one.first[0]
    return made


def output_part(output: Any, name: str) -> Tensor:
    """Return the "loss" or "logits" in what a user's model gave: a key, an attribute, the first of a tuple, or all."""
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if hasattr(output, name):
        return getattr(output, name)
    return cast(Tensor, output[0] if isinstance(output, tuple | list) else output)


def check_forward(model: nn.Module, source: ModelSource, inputs: Inputs) -> int | None:
    """Run a forward without data on a model that is on meta; return the FLOPs of one sample, None if none are counted.

    Raises ModelError("model-shape") unless the model takes these inputs and gives fit logits. FLOPs are multiply-adds
    times two, counted op by op by torch's own counter.
    """
    with torch.device("meta"):
        batch = {key: t.bfloat16() if t.is_floating_point() else t for key, t in empty_batch(inputs, TRIED).items()}
    if isinstance(inputs, ImageInputs):
        got, knob = f"images of shape {tuple(batch['inputs'].shape[1:])}", "--image-size"
    elif isinstance(inputs, TableInputs):
        got, knob = f"rows of {inputs.features} features", "--data"
    elif isinstance(inputs, NamedInputs):
        got, knob = ", ".join(f"{one.name} of shape {one.shape}" for one in inputs.tensors), "--seq-len or --input"
    else:
        got, knob = f"sequences of {inputs.seq_len} tokens", "--seq-len"
    # in bf16, since the grouped products of mixtures of experts have no other type on meta
    trial = copy.deepcopy(model).bfloat16().eval()
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    try:
        # fakes take time to import, and only transformers asks whether tensors have values
        fakes = fake_tensors() if source.family == "transformers" else nullcontext()
        with fakes, counter, torch.no_grad():
            if isinstance(inputs, NamedInputs):
                logits = None
                forward_loss(trial, inputs, batch)
            else:
                apart = refuse_unseparated(trial, source.name) if are_packed(inputs) else nullcontext()
                with apart:
                    logits, _ = forward_logits(trial, batch["inputs"], **extra_inputs(inputs, batch))
    except ModelError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"{source.name} asks for the values of tensors in its forward ({reason_of(error)})"
        hint = "what it needs is not known before it runs: zerofit can neither plan nor train it"
        raise ModelError("model-values", message, hint) from None
    except Exception as error:  # what a model raises on a shape, or on a value of its config, is of any type
        hint = f"set {knob}" + (", e.g. --image-size 224" if knob == "--image-size" else "")
        raise ModelError("model-shape", f"{source.name} cannot take {got}: {reason_of(error)}", hint) from None
    classes = inputs.classes if isinstance(inputs, ImageInputs | TableInputs) else inputs.vocab_size
    if isinstance(inputs, LabelledTextInputs):
        classes = len(inputs.classes)
    per_class = 1 if isinstance(inputs, SegmentationInputs) else -1
    if logits is not None and source.task != "gan" and logits.shape[per_class] < classes:
        message = f"{source.name} gives {logits.shape[per_class]} logits, the data has {classes} classes or token ids"
        raise ModelError("model-shape", message, "leave the number of classes out of --model-args")
    return counter.get_total_flops() // TRIED or None


@cache
def _arguments(cls: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Return FLOPs of a (tokens, k) by (experts, k, n) grouped product, which torch's counter does not know."""
    return 2 * a[0] * a[1] * b[-1]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors fake: nothing is computed, and transformers sees that masks have no values to ask for.

    Errors come as exceptions only; torch would also log them with a traceback.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with (
            patch.dict(os.environ, UNCHECKED),
            patch.dict(fake_impls.op_implementations_dict, {torch.ops.aten.bincount.default: bincount}),
            mamba_kernels(),
            EveryLayer(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    finally:
        log.setLevel(level)


def bincount(fake_mode: Any, func: Any, values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return the output of torch.bincount where no value reaches `minlength`: a router's counts of its experts.

    Without values the real one has no form. (transformers before 5.23 counts a router's loss so)
    """
    if not minlength:
        raise DynamicOutputShapeException(func)
    return values.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def parameter_count(model: nn.Module) -> int:
    """Count parameters, tied ones once; those that ZeRO-3 holds elsewhere count with their full size."""
    return sum(map(elements, model.parameters()))


def parameter_groups(parameters: Iterable[nn.Parameter], decay: bool = True) -> list[dict[str, Any]]:
    """Group matrices, which decay, and vectors (norms, biases), which do not; one group where nothing decays.

    Each group costs the engine buckets and collectives of its own. DeepSpeed takes experts out of them, by their names
    (moe/utils.py:103).
    """
    trained = [p for p in parameters if p.requires_grad]
    if not decay:
        return [{"name": "all", "params": trained}]
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"name": "matrices", "params": matrices}, {"name": "vectors", "params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]  # DeepSpeed fails on an empty one


def expert_places(model: nn.Module) -> list[int]:
    """Return the places in model.parameters() of weights of experts that are spread, by DeepSpeed's mark of them."""
    return [place for place, p in enumerate(model.parameters()) if getattr(p, "allreduce", True) is False]


def count_parameters(source: ModelSource) -> int:
    """Count the parameters of a named model in its published shape, on the meta device."""
    with torch.device("meta"):
        return parameter_count(build(source, None, {}))


def source_max_positions(source: ModelSource, args: dict[str, Any]) -> int | None:
    """Return the longest sequence in tokens before any model is built; None for models without such a limit."""
    if not is_text(source.task):
        return None
    return max_positions(make_config(source, None, args))


def _zerofit(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]) -> nn.Module:
    wanted = inputs or PUBLISHED_INPUTS[source.name]
    builder = cast(Callable[..., nn.Module], DCGAN if source.family == "gan" else BUILDERS[source.name])
    known = [name for name in inspect.signature(builder).parameters if name != "inputs"]
    for key in args:
        if key not in known:
            hint = f"{source.name} takes: {', '.join(known) or 'none'}"
            raise ModelError("model-args", f"{source.name} has no argument {key!r}", hint)
    try:
        return builder(wanted, **args)
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        fed = f"{wanted.size}x{wanted.size} images" if isinstance(wanted, ImageInputs) else "such a table"
        message = f"{source.name} cannot be made for {fed}: {error}"
        raise ModelError("model-shape", message, "set --image-size or correct --model-args") from None


def _custom(source: ModelSource, inputs: Inputs | None, args: dict[str, Any]) -> nn.Module:
    """Return what the user's callable returns for `args`; modules of the current folder can be named."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, attribute = source.name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a user's own module can raise anything, a SyntaxError with its line among them
        hint = "give package.module:callable, seen from the current folder"
        raise ModelError("model-import", f"{source.name} cannot be imported: {error}", hint) from error
    try:
        model = target(**args)
    except Exception as error:  # anything can go wrong in a user's own code
        message = f"{source.name}(**{args}) raised {type(error).__name__}: {error}"
        raise ModelError("model-args", message, "its arguments come from --model-args") from error
    if not isinstance(model, nn.Module):
        message = f"{source.name} gave a {type(model).__name__}, not a torch.nn.Module"
        raise ModelError("model-import", message, "name a Module's class, or a function that returns a model")
    refuse_lazy(model, source.name)
    return model


def refuse_lazy(model: nn.Module, name: str) -> None:
    """Raise ModelError for parameters that have no shape before a first forward: nn.LazyLinear's and its like."""
    lazy = [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        message = f"{name}: {', '.join(lazy[:3])} {'has' if len(lazy) == 1 else 'have'} no shape before a first forward"
        hint = "run one in the function that makes the model, model(torch.zeros(...)), or give the layer its size"
        raise ModelError("model-lazy", message, hint)


def _checkpoint(model: Any) -> None:
    if is_denoiser(model):
        model.enable_gradient_checkpointing()
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        parts = (model.generator, model.discriminator) if isinstance(model, DCGAN) else (model,)
        for part in parts:
            checkpoint_model(part)
        return
    if not model.supports_gradient_checkpointing:
        message = f"transformers has no activation checkpointing for {type(model).__name__}"
        raise ModelError("model-checkpointing", message, "train without --activation-checkpointing")
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name; the older one warns where both exist
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


BUILD = {
    "zerofit": _zerofit,
    "gan": _zerofit,
    "torchvision": torchvision_model,
    "transformers": transformers_model,
    "diffusers": denoiser,
    "custom": _custom,
}
