"""Build models for their inputs, check the inputs, and call all models in the same way."""

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
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.checkpointing import checkpoint_model, selective_contexts
from zerofit.models.deferred import NotDeferrableError, Stored, build_deferred, store_parameters, why_not_deferrable
from zerofit.models.denoisers import denoiser, denoising_loss, is_denoiser
from zerofit.models.hf import IN_FP32, transformers_model
from zerofit.models.hf_config import make_config, max_positions
from zerofit.models.image_grids import grid_arguments
from zerofit.models.inputs import (
    ImageInputs,
    Inputs,
    LabelledTextInputs,
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
from zerofit.models.presets import ModelArgs
from zerofit.models.pretrained import load_pretrained
from zerofit.models.quantized import Quantizer, elements
from zerofit.models.state_space import mamba_kernels
from zerofit.models.vision import BUILDERS, DCGAN, published_inputs, torchvision_model
from zerofit.spec.errors import reason_of
from zerofit.spec.model_facts import gives_loss, has_head, is_text

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

TRIAL_SAMPLES = 2  # since one sample may take another code path
# transformers compares the number of images with their placeholders in the text, which needs values
UNCHECKED = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}
# arguments of a forward that returns a loss, if the forward has such arguments
_LOSS_OPTIONS = {"use_cache": False, "return_loss": True}


def build(
    source: ModelSource,
    inputs: Inputs | None,
    args: ModelArgs,
    *,
    checkpointing: Checkpointing = False,
    stored: Stored | None = None,
    keep: set[str] | None = None,
) -> nn.Module:
    """Build the model for its inputs, in fp32 on the current default device (also meta).

    Parameters that are not trained (`source.partial`) are frozen, and adapters are added. Weights come from torch's
    global random generator, or from a pretrained folder. `args` override the keys of a transformers config, or are
    keyword arguments of other models. If `inputs` is None, the model has its published shape.

    `stored`: cast and move each parameter as soon as it has its values. So extra memory is needed for one layer
    only. If a user's model cannot be built parameter by parameter (see `why_whole`), it is built in full first.
    `keep`: names of the parameters to store (None: all). Other parameters stay on meta.
    """
    if inputs is not None:
        _refuse_inputs(source, inputs)
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
        _checkpoint(model, checkpointing)
    return model if source.partial is None else train_part(model, source.partial)


def _refuse_inputs(source: ModelSource, inputs: Inputs) -> None:
    kinds = {
        ImageInputs: "images",
        SegmentationInputs: "images with masks",
        TableInputs: "a table",
        TextInputs: "text",
        LabelledTextInputs: "text with labels",
    }
    got = kinds.get(type(inputs))
    for needed, does, is_task in (
        (ImageInputs, "classifies images", source.task in ("image", "gan")),
        (SegmentationInputs, "classifies pixels", source.task == "segmentation"),
        (TableInputs, "classifies rows of a table", source.task == "table"),
        (LabelledTextInputs, "labels text", has_head(source.task)),
        (TextInputs, "reads text", is_text(source.task) and not has_head(source.task)),
    ):
        if is_task and got and type(inputs) is not needed:
            raise ModelError("model-task", f"{source.name} {does}, but the data is {got}", "use other --data")
    if source.task != "custom" and gives_loss(source.task) != isinstance(inputs, NamedInputs):
        message = f"{source.name} ({source.task}) needs inputs that the data does not have"
        raise ModelError("model-task", message, "use --data synthetic")


def why_whole(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> str | None:
    """Return why a model cannot be built parameter by parameter, or None. Needs no memory."""
    if source.family == "transformers":
        return None
    return why_not_deferrable(partial(BUILD[source.family], source, inputs, dict(args)))


def forward_logits(model: nn.Module, x: Tensor, **extra: object) -> tuple[Tensor, Tensor | None]:
    """Return the logits of a batch, and the loss of a mixture-of-experts model's routers.

    `x`: token ids (batch, seq_len) or images (batch, channels, size, size). `extra`: other arguments of the model, such
    as position_ids for sequence parallelism. The routers' loss is coefficient * load balancing loss. It is None if the
    model is not in training mode, or returns no such loss.

    If the model is in a wrapper with an attribute `module`, such as a DeepSpeed engine, the wrapper is called.
    """
    inner = _unwrapped(model)
    if not hasattr(inner, "main_input_name"):
        out = model(x, **extra)
        out = out["out"] if isinstance(out, dict) and "out" in out else out  # torchvision's segmentation models
        return cast(Tensor, getattr(out, "logits", out)), None
    if inner.main_input_name == "pixel_values":
        return _logits_of(model(pixel_values=x, **extra)), None
    if "use_cache" in _arguments(type(inner)) | _arguments(type(inner.base_model)):  # Granite's head passes it on
        extra["use_cache"] = False
    out = model(input_ids=x, **extra)
    aux = getattr(out, "aux_loss", None)
    if aux is None or not inner.training:
        return _logits_of(out), None
    return _logits_of(out), cast("PreTrainedModel", inner).config.router_aux_loss_coef * aux


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", model)
    return getattr(inner, "_orig_mod", inner)  # torch.compile's wrapper has another signature


def _logits_of(out: object) -> Tensor:
    logits = getattr(out, "logits", None)
    if logits is None:
        raise ModelError("model-shape", f"transformers returns {type(out).__name__} without logits for this model")
    return logits


class LossOutput(Protocol):
    """What a model that returns its own loss returns."""

    loss: Tensor
    logits: Tensor  # a denoiser has none


def forward_named(model: nn.Module, inputs: NamedInputs, batch: Mapping[str, Tensor]) -> LossOutput:
    """Return an object with `loss` and `logits` for a batch of named inputs.

    The model is transformers' or a denoiser, and may be in a wrapper, as in `forward_logits`.
    """
    inner = _unwrapped(model)
    named = {tensor.name: batch[key] for key, tensor in zip(batch_keys(inputs), inputs.tensors, strict=True)}
    if is_denoiser(inner):
        return cast(LossOutput, SimpleNamespace(loss=denoising_loss(model, named), logits=None))
    arguments: dict[str, object] = dict(named)
    for tensor in inputs.tensors:
        if tensor.name == "pixel_values" and tensor.image:
            arguments |= grid_arguments(inner, inputs, named)
    extra = {name: value for name, value in _LOSS_OPTIONS.items() if name in _arguments(type(inner))}
    return model(**arguments, **extra)


def batch_keys(inputs: Inputs) -> list[str]:
    """Return the keys of a batch: "inputs", the names of further tensors, "labels"."""
    return ["inputs", *(tensor.name for tensor in tensors_of(inputs)[1:-1]), "labels"]


def extra_inputs(inputs: Inputs | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch's tensors except inputs and labels, by the forward's argument names."""
    return {key: batch[key] for key in batch_keys(inputs)[1:-1]} if inputs is not None else {}


def empty_batch(inputs: Inputs, count: int, make: Callable[..., Tensor] = torch.zeros) -> dict[str, Tensor]:
    """Return a batch of `count` samples made by `make`, with the keys of a loader's batch.

    Ids are int64, other tensors float32, all on the current default device. Tokens that begin every sample, such as
    an image's placeholders, have their real values.
    """
    batch = {}
    for key, tensor in zip(batch_keys(inputs), tensors_of(inputs), strict=True):
        batch[key] = make(count, *tensor.shape, dtype=torch.float32 if tensor.ids is None else torch.long)
        if tensor.first is not None:
            token, repeats = tensor.first
            batch[key][:, :repeats] = token
    return batch


def output_part(output: object, name: str) -> Tensor:
    """Return the loss or the logits (`name`) from the output of a user's model.

    This is the output's key or attribute `name`, or the first element of a tuple, or the output itself.
    """
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if hasattr(output, name):
        return getattr(output, name)
    return cast(Tensor, output[0] if isinstance(output, tuple | list) else output)


# Wrong inputs show up here, before any rank starts: a forward on meta takes a second and no memory; a failing
# launch on many hosts takes minutes. The same forward counts the FLOPs for the utilization that training reports.
def check_forward(model: nn.Module, source: ModelSource, inputs: Inputs) -> int | None:
    """Run a forward of a model on the meta device, without data. Return the FLOPs per sample.

    FLOPs are two per multiply-add, counted by torch's counter. The result is None if the counter finds none. Raises
    ModelError("model-shape") if the model does not accept these inputs or returns too few logits.
    """
    with torch.device("meta"):
        samples = empty_batch(inputs, TRIAL_SAMPLES)
        batch = {key: t.bfloat16() if t.is_floating_point() else t for key, t in samples.items()}
    if isinstance(inputs, ImageInputs):
        got, knob = f"images of shape {tuple(batch['inputs'].shape[1:])}", "--image-size"
    elif isinstance(inputs, TableInputs):
        got, knob = f"rows of {inputs.features} features", "--data"
    elif isinstance(inputs, NamedInputs):
        got = ", ".join(f"{t.name} of shape {t.shape}" for t in inputs.tensors)
        knob = "--seq-len or --input"
    else:
        got, knob = f"sequences of {inputs.seq_len} tokens", "--seq-len"
    # bf16, since grouped matrix products of experts support no other type on meta. Without gradients, since the
    # counter's hooks fail for a weight that is passed to a module, as in DeBERTa (torch/autograd/graph.py:206).
    trial = copy.deepcopy(model).bfloat16().eval().requires_grad_(False)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    try:
        # slow to import, and only transformers checks whether tensors have values
        fakes = fake_tensors() if source.family == "transformers" else nullcontext()
        with fakes, counter, torch.no_grad():
            if isinstance(inputs, NamedInputs):
                logits = None
                forward_named(trial, inputs, batch)
            else:
                separated = refuse_unseparated(trial, source.name) if are_packed(inputs) else nullcontext()
                with separated:
                    logits, _ = forward_logits(trial, batch["inputs"], **extra_inputs(inputs, batch))
    except ModelError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"{source.name} needs the values of tensors in its forward ({reason_of(error)})"
        hint = "its memory cannot be forecast, so zerofit can neither plan nor train it"
        raise ModelError("model-values", message, hint) from None
    except Exception as error:  # models raise any type of error for a wrong shape or config
        hint = f"set {knob}" + (", e.g. --image-size 224" if knob == "--image-size" else "")
        raise ModelError("model-shape", f"{source.name} does not accept {got}: {reason_of(error)}", hint) from None
    classes = inputs.classes if isinstance(inputs, ImageInputs | TableInputs) else inputs.vocab_size
    if isinstance(inputs, LabelledTextInputs):
        classes = len(inputs.classes)
    per_class = 1 if isinstance(inputs, SegmentationInputs) else -1
    if logits is not None and source.task != "gan" and logits.shape[per_class] < classes:
        message = f"{source.name} returns {logits.shape[per_class]} logits for {classes} classes or token ids"
        raise ModelError("model-shape", message, "leave the number of classes out of --model-args")
    return counter.get_total_flops() // TRIAL_SAMPLES or None


@cache
def _arguments(cls: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)


def _grouped_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped matmul of (tokens, k) and (experts, k, n)."""
    return 2 * a[0] * a[1] * b[-1]


@contextmanager
def no_value_checks() -> Iterator[None]:
    """Disable checks that need the values of tensors.

    They are transformers' check of padding ids (warn_if_padding_and_no_attention_mask in
    transformers/modeling_utils.py) and torch's checks of distributions (torch/distributions/distribution.py).
    """
    loaded = sys.modules.get("transformers.modeling_utils")
    name = "warn_if_padding_and_no_attention_mask"
    padding = patch.object(loaded.PreTrainedModel, name, lambda *_: None) if loaded else nullcontext()
    with padding, patch.object(Distribution, "_validate_args", False):
        yield


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make all tensors fake inside this context, so nothing is computed.

    transformers does not read the values of masks. Errors are raised as usual, but torch does not log them.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with (
            patch.dict(os.environ, UNCHECKED),
            patch.dict(fake_impls.op_implementations_dict, {torch.ops.aten.bincount.default: bincount}),
            no_value_checks(),
            mamba_kernels(),
            EveryLayer(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    finally:
        log.setLevel(level)


def bincount(
    fake_mode: FakeTensorMode | None,
    func: OpOverload,
    values: Tensor,
    weights: Tensor | None = None,
    minlength: int = 0,
) -> Tensor:
    """Return torch.bincount's output on fake tensors. All values must be below `minlength`.

    Without values the shape of the real output is unknown. In transformers before 5.23, router losses call bincount on
    the experts' ids.
    """
    if not minlength:
        raise DynamicOutputShapeException(func)
    return values.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def parameter_count(model: nn.Module) -> int:
    """Count a model's parameters.

    Tied parameters count once. Parameters partitioned by ZeRO-3 count in full.
    """
    return sum(map(elements, model.parameters()))


class OptimizerGroup(TypedDict):
    """A group of parameters with its own settings, as torch's optimizers get it."""

    name: str
    params: list[nn.Parameter]
    weight_decay: NotRequired[float]  # default: the optimizer's


def parameter_groups(parameters: Iterable[nn.Parameter], decay: bool = True) -> list[OptimizerGroup]:
    """Return two groups of the trained parameters, or one group if `decay` is False.

    Matrices have weight decay; vectors (norms, biases) have none.

    Each group needs its own buckets and collectives. DeepSpeed splits off experts by the groups' names
    (moe/utils.py:103).
    """
    trained = [p for p in parameters if p.requires_grad]
    if not decay:
        return [{"name": "all", "params": trained}]
    # ZeRO-3 has flattened partitions; `ds_shape` is the shape of the full parameter
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups: list[OptimizerGroup] = [{"name": "matrices", "params": matrices}]
    groups.append({"name": "vectors", "params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]  # DeepSpeed fails on an empty group


def expert_places(model: nn.Module) -> list[int]:
    """Return the indices in model.parameters() of the weights that DeepSpeed marks as experts."""
    return [index for index, p in enumerate(model.parameters()) if getattr(p, "allreduce", True) is False]


def source_max_positions(source: ModelSource, args: ModelArgs) -> int | None:
    """Return a model's maximum sequence length in tokens, or None, without building it."""
    if not is_text(source.task):
        return None
    return max_positions(make_config(source, None, args))


def _zerofit(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> nn.Module:
    wanted = inputs or published_inputs(source)
    builder = cast(Callable[..., nn.Module], DCGAN if source.family == "gan" else BUILDERS[source.name])
    known = [name for name in inspect.signature(builder).parameters if name != "inputs"]
    for key in args:
        if key not in known:
            hint = f"allowed: {', '.join(known) or 'none'}"
            raise ModelError("model-args", f"{source.name} has no argument {key!r}", hint)
    try:
        return builder(wanted, **args)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        fed = f"{wanted.size}x{wanted.size} images" if isinstance(wanted, ImageInputs) else "such a table"
        message = f"{source.name} cannot be built for {fed}: {error}"
        raise ModelError("model-shape", message, "set --image-size or correct --model-args") from None


def _custom(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> nn.Module:
    """Call the user's callable with `args`. It may be in a module in the current folder."""
    if os.getcwd() not in sys.path:  # Python puts the script's folder there, not the current folder
        sys.path.append(os.getcwd())
    module_name, _, attribute = source.name.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a user's module can raise anything, including SyntaxError
        hint = "give package.module:callable, importable from the current folder"
        raise ModelError("model-import", f"{source.name} cannot be imported: {error}", hint) from error
    try:
        model = target(**args)
    except Exception as error:  # a user's code can raise anything
        message = f"{source.name}(**{args}) raised {type(error).__name__}: {error}"
        raise ModelError("model-args", message, "its arguments come from --model-args") from error
    if not isinstance(model, nn.Module):
        message = f"{source.name} returned {type(model).__name__}, not a torch.nn.Module"
        raise ModelError("model-import", message, "give a Module's class, or a function that returns a model")
    refuse_lazy(model, source.name)
    return model


def refuse_lazy(model: nn.Module, name: str) -> None:
    """Raise ModelError if parameters have no shape before a forward, as in nn.LazyLinear."""
    lazy = [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        message = f"{name}: {', '.join(lazy[:3])} {'has' if len(lazy) == 1 else 'have'} no shape before a forward"
        hint = "run a forward in the function that builds the model, or give the layer its size"
        raise ModelError("model-lazy", message, hint)


def _checkpoint(model: nn.Module, kind: Checkpointing) -> None:
    if kind == "selective" and (is_denoiser(model) or not hasattr(model, "gradient_checkpointing_enable")):
        message = f"selective checkpointing needs a model of transformers, but this is {type(model).__name__}"
        raise ModelError("model-checkpointing", message, "use --activation-checkpointing")
    if is_denoiser(model):
        cast("ModelMixin", model).enable_gradient_checkpointing()
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        parts = (model.generator, model.discriminator) if isinstance(model, DCGAN) else (model,)
        for part in parts:
            checkpoint_model(part)
        return
    transformer = cast("PreTrainedModel", model)
    if not transformer.supports_gradient_checkpointing:
        message = f"transformers has no activation checkpointing for {type(model).__name__}"
        raise ModelError("model-checkpointing", message, "train without --activation-checkpointing")
    options = {"use_reentrant": False, **({"context_fn": selective_contexts} if kind == "selective" else {})}
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name; the older one warns if both exist
        transformer.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# by family of a ModelSource; each builds in fp32 on the current default device
BUILD = {
    "zerofit": _zerofit,
    "gan": _zerofit,
    "torchvision": torchvision_model,
    "transformers": transformers_model,
    "diffusers": denoiser,
    "custom": _custom,
}
