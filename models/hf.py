"""Build transformers models from a config or from a pretrained folder.

The same seed gives the same initial weights, whichever part of the model is kept. A model is built on the meta device
and initialized module by module in transformers' order. Random numbers are drawn for every tensor. If a tensor stays on
meta, its numbers are discarded.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zerofit.models.catalog import PRETRAINED, QUANTIZED, ModelError, ModelSource, source_config
from zerofit.models.deferred import Stored, as_parameter, store_parameters
from zerofit.models.hf_config import ATTENTION, PLAIN_KERNELS, make_config
from zerofit.models.inputs import Inputs
from zerofit.models.presets import ModelArgs
from zerofit.spec.errors import reason_of
from zerofit.spec.local_machine import is_older
from zerofit.spec.process import collector_off

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_Constructor = Callable[..., Tensor]  # such as torch.arange
IN_FP32 = Stored(dtype=torch.float32, device=torch.device("cpu"))
# functions of transformers' initialization that draw no random numbers
_DRAWLESS = ("constant_", "ones_", "zeros_", "eye_", "dirac_")
AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech": "AutoModelForSpeechSeq2Seq",
    "image-text-pairs": "AutoModelForZeroShotImageClassification",
    "image-text": "AutoModelForImageTextToText",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
}


def transformers_model(
    source: ModelSource, inputs: Inputs | None, args: ModelArgs, stored: Stored = IN_FP32, keep: set[str] | None = None
) -> nn.Module:
    """Build a transformers model on the current default device.

    It is pretrained, or has random initial weights. Parameters are `stored` module by module, or tensor by tensor from
    files, so the full fp32 model is never in memory. `keep`: see `_initialize`.

    Initial weights are drawn on the CPU exactly as by transformers' `initialize_weights`, with no other draws. So the
    weights are the same for the full model and for a pipeline stage (`keep`). They are also the same if ZeRO
    stage 3 partitions the model while it is built (with an HfDeepSpeedConfig). `from_config` alone would first draw
    torch's default weights, except under ZeRO-3.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    config = make_config(source, inputs, args)
    device = torch.empty(0).device
    if source.origin == PRETRAINED and device.type != "meta":
        same_draws = _as_without_zero3() if is_deepspeed_zero3_enabled() else nullcontext()
        with same_draws:  # for a head that is not in the folder
            # transformers returns it in evaluation mode: without dropout, and int8 layers would quantize their inputs
            loaded = _rotary_in_fp32(_pretrained(source, config, stored, keep)).train()
            return _with_kernel(loaded, source, args)
    if is_deepspeed_zero3_enabled() and device.type != "meta":
        with _as_without_zero3():
            return _with_kernel(_rotary_in_fp32(_from_config(source, config)), source, args)
    with torch.device("meta"):
        model = _rotary_in_fp32(_from_config(source, config))
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            message = f"{source.name}: {name} is empty, its shape is {tuple(parameter.shape)}"
            raise ModelError("model-args", message, "correct --model-args or the config")
    if device.type == "meta":
        return model
    drawn = _with_kernel(_initialize(model, keep, stored), source, args)
    return drawn if device.type == "cpu" else drawn.to(device)  # with torch.device("cuda") around this


def _with_kernel(model: nn.Module, source: ModelSource, args: ModelArgs) -> nn.Module:
    """Switch the model to the attention kernel of another package that `args` name.

    The model was built with torch's kernel (sdpa), because `make_config` replaces kernels of other packages by sdpa.
    Raises ModelError if the kernel is not usable.
    """
    kernel = args.get(ATTENTION)
    if kernel not in PLAIN_KERNELS:
        try:
            cast("PreTrainedModel", model).set_attn_implementation(kernel)
        except (ImportError, ValueError, RuntimeError) as error:
            message = f"{source.name} cannot use {ATTENTION}={kernel}: {reason_of(error)}"
            raise ModelError("model-args", message, "install its package, or use sdpa") from error
    return model


def _auto_class(task: str):
    with collector_off():
        import transformers

        return getattr(transformers, AUTO_CLASSES[task])


def _from_config(source: ModelSource, config: PreTrainedConfig) -> nn.Module:
    """Build the model from its config, in fp32, with sdpa attention if it supports that."""
    try:
        with _head_apart(config):
            return _auto_class(source.task).from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # wrong shapes raise many kinds of errors
        message = f"{source.name} cannot be built from its config: {reason_of(error)}"
        raise ModelError("model-args", message, "correct --model-args or the config") from error


@contextmanager
def _head_apart(config: PreTrainedConfig) -> Iterator[None]:
    """Build T5 1.1 and Flan-T5 with a separate head.

    The checkpoints of these models have a separate head, and their config.json sets "tie_word_embeddings" to false.
    transformers stores this value as `scale_decoder_outputs`, and ties the head anyway (transformers/models/t5).
    """
    if getattr(config, "scale_decoder_outputs", True):
        yield
        return
    from transformers import T5ForConditionalGeneration as T5

    original: Callable[..., None] = T5.__init__

    def init(self: T5, *args: object, **kwargs: object) -> None:
        self._tied_weights_keys = {name: of for name, of in T5._tied_weights_keys.items() if name != "lm_head.weight"}
        original(self, *args, **kwargs)

    with patch.object(T5, "__init__", init):
        yield


def _pretrained(source: ModelSource, config: PreTrainedConfig, stored: Stored, keep: set[str] | None) -> nn.Module:
    """Load the folder's weights.

    A classifier's head may be missing or of another shape; it is then random. Raises ModelError if the files cannot be
    loaded, if another tensor has a wrong shape, or if another tensor of an image model is missing. For other tasks,
    missing tensors are not refused here; they are random.
    """
    # from_pretrained reads each tensor in float32, and `_stored_as_read` casts and moves it before the next one is
    # read. It silently draws missing weights, so the loading info is checked afterwards: only a new head may be random.
    quantized = source_config(source).get(QUANTIZED)
    if quantized:  # by one of the methods in DEQUANTIZED (`source_of`)
        config.quantization_config = {**quantized, "dequantize": True}
    try:
        with _stored_as_read(stored, keep) as read:
            model, loaded = _auto_class(source.task).from_pretrained(
                source.path,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=source.task in ("image", "classify", "tag"),
                output_loading_info=True,
            )
    except Exception as error:  # damaged or foreign files raise many kinds of errors
        message = f"{source.path} cannot be loaded: {reason_of(error)}"
        raise ModelError("model-weights", message, "check that all files are there and match this config") from error
    for name, saved, wanted in loaded["mismatched_keys"]:
        if wanted[0] != config.num_labels:
            message = f"{source.path} has {name} of shape {tuple(saved)}, but the config needs {tuple(wanted)}"
            raise ModelError("model-weights", message, "only the number of classes may differ; correct --model-args")
    drawn = [name for name in loaded["missing_keys"] if source.task == "image" and not _of_head(model, config, name)]
    if drawn:
        message = f"{source.path} lacks {', '.join(sorted(drawn)[:5])}: these weights would be random"
        raise ModelError("model-weights", message, "check that all files are there and match this config")
    if stored == IN_FP32 and keep is None:
        return model
    unread = {name: take for name, take in stored.slices.items() if name not in read}
    return store_parameters(model, replace(stored, slices=unread), keep)  # the tensors that are not in the folder


def _of_head(model: nn.Module, config: PreTrainedConfig, name: str) -> bool:
    """Return whether the tensor `name` has one row per class, or is not in the model."""
    tensor = model.state_dict().get(name)
    return tensor is None or tuple(getattr(tensor, "ds_shape", tensor.shape))[:1] == (config.num_labels,)


@contextmanager
def _stored_as_read(stored: Stored, keep: set[str] | None) -> Iterator[set[str]]:
    """Make transformers store each parameter as soon as it is read.

    Parameters that are not in `keep` are dropped. By default transformers first reads all parameters in fp32. Yields
    the growing set of the names that were read. (transformers/core_model_loading.py: set_param_for_module)
    """
    from transformers import core_model_loading

    original: Callable[..., None] = core_model_loading.set_param_for_module
    read: set[str] = set()

    def set_param(model: PreTrainedModel, name: str, value: Tensor, *args: object, **kwargs: object) -> None:
        parent, _, attribute = name.rpartition(".")
        parameters = model.get_submodule(parent)._parameters
        if attribute not in parameters:
            original(model, name, value, *args, **kwargs)
            return
        is_kept = keep is None or name in keep or any(model.all_tied_weights_keys.get(other) == name for other in keep)
        original(model, name, value.detach() if is_kept else value.detach().to("meta"), *args, **kwargs)
        parameter = parameters[attribute]  # still the old one, on meta, if the shape differs
        if parameter is not None and not parameter.is_meta:
            data = stored.store(parameter.data, name)
            parameter.requires_grad_(parameter.requires_grad and data.is_floating_point())
            parameter.data = data  # the same object, which transformers has marked as loaded
            read.add(name)

    if stored == IN_FP32 and keep is None:
        yield read
        return
    # without threads that read tensors ahead, only one is in memory
    one_at_a_time = patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    with one_at_a_time, patch.object(core_model_loading, "set_param_for_module", set_param):
        yield read


@torch.no_grad()
def _initialize(model: nn.Module, keep: set[str] | None, stored: Stored) -> nn.Module:
    """Initialize a transformers model on meta, in place, from the present state of torch's generator.

    `keep` names the parameters to keep in memory (None: all). Other parameters stay on meta. The weights are exactly
    those of `build`, then cast as `stored` requests. A tied parameter is kept if any of its names is in `keep`. All
    buffers become real, on the CPU, since they are small.
    """
    from transformers.initialization import guard_torch_init_functions

    transformer = cast("PreTrainedModel", model)
    tied: dict[str, str] = dict(transformer.all_tied_weights_keys)
    # names of the parameters to make real; a tied parameter has the name of its source
    names = {name for name, _ in model.named_parameters()} if keep is None else set(keep)
    wanted = (names - set(tied)) | {tied[name] for name in names & set(tied)}
    # transformers initializes before it ties: it draws the numbers of both parameters and drops one. If both shared a
    # tensor, the second draw would overwrite the first.
    for name in tied:
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, attribute, nn.Parameter(torch.empty_like(getattr(owner, attribute), device="meta")))
    real = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in wanted}
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with guard_torch_init_functions(), _drawing_in_fp32():
        _initialize_modules(model, transformer._initialize_weights, real, stored)
    temperature = getattr(transformer.config, "logit_scale_init_value", None)
    if temperature is not None and hasattr(model, "logit_scale"):  # set by its constructor (modeling_clip.py)
        cast(Tensor, model.logit_scale).fill_(temperature)
    transformer.tie_weights()
    return model


# transformers' `initialize_weights` visits modules in this order, and each draw depends on earlier draws. So every
# module is initialized, also those whose parameters stay on meta: their numbers are drawn and discarded.
def _initialize_modules(
    module: nn.Module, initialize_own: Callable[[nn.Module], None], real: dict[int, str], stored: Stored
) -> None:
    """Initialize a module like transformers' `initialize_weights`.

    Children come first, then the module (`initialize_own`). Inner models are initialized by their own rules. `real`:
    the names of kept parameters, by id. A parameter is in fp32 on the CPU only while its module is initialized.
    """
    from transformers import PreTrainedModel

    for child in module.children():
        rules = child._initialize_weights if isinstance(child, PreTrainedModel) else initialize_own
        _initialize_modules(child, rules, real, stored)
    if vars(module)["_is_hf_initialized"]:
        return  # done before: this module is in the model twice
    parameters = module._parameters
    names = {name: real[id(p)] for name, p in parameters.items() if id(p) in real}
    for name, parameter in parameters.items():
        if parameter is not None:
            device = "cpu" if id(parameter) in real else "meta"
            empty = torch.empty_like(parameter, device=device)
            parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    initialize_own(module)
    for name, parameter in parameters.items():
        if parameter is not None and not parameter.is_meta and stored != IN_FP32:
            parameters[name] = as_parameter(stored.store(parameter.data, names[name]), parameter.requires_grad)


# Draws in bf16 or on a GPU give different numbers than in fp32 on the CPU. A run must start with the same weights in
# each precision and layout, so all draws happen in fp32 on the CPU.
@contextmanager
def _drawing_in_fp32() -> Iterator[None]:
    """Make transformers' random initializers draw on the CPU in fp32.

    This holds for all tensors, including meta and stored ones. The initializers must really run, since the number of
    draws can depend on the values: trunc_normal_ draws again for values outside its range.
    """
    from transformers import initialization

    def drawn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
                return function(tensor, *args, **kwargs)
            # The layout in memory decides which number goes where, so the drawn tensor has the same strides.
            numbers = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)
            function(numbers, *args, **kwargs)
            return tensor if tensor.is_meta else tensor.copy_(numbers)

        return run

    functions = initialization.TORCH_INIT_FUNCTIONS
    with patch.dict(functions, {name: drawn(functions[name]) for name in set(functions) - set(_DRAWLESS)}):
        yield


@contextmanager
def _as_without_zero3() -> Iterator[None]:
    """Give a model that ZeRO-3 partitions during its build the weights it has without ZeRO-3."""
    from transformers import PreTrainedModel

    original: Callable[..., None] = PreTrainedModel._initialize_weights
    # Some constructors draw values that are overwritten later, so initialization starts with the state before them.
    start: list[Tensor] = [torch.get_rng_state()]

    def on_cpu(self: PreTrainedModel, module: nn.Module, *args: object) -> None:
        if start:
            torch.set_rng_state(start.pop())
        with _held_on_cpu(module):  # other devices and precisions draw different numbers
            original(self, module, *args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(PreTrainedModel, "_initialize_weights", on_cpu))
        if is_older("transformers", (5, 23)):  # transformers 5.23 does both itself
            stack.enter_context(_gathered_with_children())
            stack.enter_context(_exact_ranges())
        yield


@contextmanager
def _exact_ranges() -> Iterator[None]:
    """Make torch.arange return the requested dtype, since rotary frequencies need fp32.

    At ZeRO-3, DeepSpeed casts ranges to 16 bits (deepspeed/runtime/zero/partition_parameters.py). transformers 5.23 and
    later prevent this cast.
    """
    from deepspeed.runtime.zero import partition_parameters as zero

    original: Callable[..., _Constructor] = zero.zero_wrapper_for_fp_tensor_constructor

    def wrapper(function: _Constructor, target_fp_dtype: torch.dtype, target_device: torch.device) -> _Constructor:
        dtype = None if function is zero._orig_torch_arange else target_fp_dtype
        return original(function, dtype, target_device)

    with patch.object(zero, "zero_wrapper_for_fp_tensor_constructor", wrapper):
        yield


@contextmanager
def _gathered_with_children() -> Iterator[None]:
    """Let a module initialize its children's parameters under ZeRO-3.

    GPT-2's blocks initialize `c_proj` this way. Versions of transformers before 5.23 gather only a module's own
    parameters. The children's tensors would then be empty when the module initializes them.
    (transformers/integrations/deepspeed.py: initialize_weights_zero3)
    """
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions
    from transformers.integrations import deepspeed as integration

    def apply(module: nn.Module, rules: Callable[[nn.Module, bool], None], remote: bool) -> None:
        import deepspeed

        for child in module.children():
            apply(child, child._initialize_weights if isinstance(child, PreTrainedModel) else rules, remote)
        owners = [module, *(child for child in module.children() if not isinstance(child, PreTrainedModel))]
        parameters = [p for owner in owners for p in owner.parameters(recurse=False)]
        if not parameters:
            rules(module, remote)
            return
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                rules(module, remote)

    @torch.no_grad()
    def initialize(model: PreTrainedModel) -> None:
        with guard_torch_init_functions():
            apply(model, model._initialize_weights, model.is_remote_code())

    with patch.object(integration, "initialize_weights_zero3", initialize):
        yield


@contextmanager
def _held_on_cpu(module: nn.Module) -> Iterator[None]:
    """Hold the gathered parameters of a module and its children in fp32 on the CPU."""
    owners = [module, *module.children()]
    parameters = {id(p): p for owner in owners for p in owner.parameters(recurse=False)}
    gathered = {key: p.data for key, p in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to("cpu", torch.float32)
    yield
    for key, parameter in parameters.items():
        gathered[key].copy_(parameter.data)
        parameter.data = gathered[key]


# In bf16, angles at position 1000 would be wrong by several radians.
def _rotary_in_fp32(model: nn.Module) -> nn.Module:
    """Keep the frequencies of rotary embeddings in fp32 when an engine casts the model."""
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module._apply = types.MethodType(_apply_device_only, module)  # a bound method survives deepcopy
    return model


def _apply_device_only(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    return nn.Module._apply(self, lambda t: t.to(function(t.new_empty(0)).device), recurse)
