"""Build a script's pretrained models from their configurations, without weights."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import PurePath
from typing import Any, cast
from urllib.parse import urlparse

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from zerofit.models.quantized import library
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.fakes.quantized import four_bits
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.tracker import ScriptTracker

_QUANTIZED = ("load_in_8bit", "load_in_4bit", "gguf_file")
# arguments for the hub, which are passed on for the configuration
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "code_revision")
_CHOSEN = ("compress_statistics", "quant_type", "quant_storage")  # set by the configuration
DeviceMap = str | int | torch.device | dict[str, str | int | torch.device] | None  # as in from_pretrained
# arguments about reading weights; `_from_config` would pass them on to the model's constructor
_READING = (
    *("use_safetensors", "weights_only", "low_cpu_mem_usage", "max_memory", "offload_folder"),
    "ignore_mismatched_sizes",
    *("trust_remote_code", "output_loading_info", "adapter_kwargs", "adapter_name", "state_dict", "key_mapping"),
    *("variant", "_from_auto", "_from_pipeline", "_commit_hash", "offload_state_dict", "offload_buffers"),
    *("fusion_config", "disable_mmap", "use_kernels", "proxies", "_fast_init", "resume_download"),
    *("from_tf", "from_flax", "download_kwargs", "load_config", "device_mesh", "allow_all_kernels"),
    *("kernel_config", "tqdm_class", "mirror"),
)


def pretrained(meter: ScriptTracker) -> None:
    """Build a pretrained model from its configuration. No weights are read or needed.

    `_from_config` uses zero.Init as `from_pretrained` does. (transformers.PreTrainedModel.from_pretrained)
    """

    # `Any`: `from_pretrained` accepts every argument of its model's class and of its configuration
    def from_pretrained(
        cls: type[PreTrainedModel],
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: object,
        config: PreTrainedConfig | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> object:
        path = pretrained_model_name_or_path
        for name in _QUANTIZED:
            if kwargs.get(name):
                raise not_simulated(f"{name}: quantized weights", "simulate with unquantized weights")
        with_report = bool(kwargs.get("output_loading_info"))
        hub = {name: kwargs.pop(name) for name in _OF_FILES if name in kwargs}
        device_map = kwargs.pop("device_map", None)
        distributed, device_map, mesh = _distribution(meter, cls, kwargs, device_map)
        for name in _READING:
            kwargs.pop(name, None)
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None)) or "auto"
        quantization, generation = kwargs.pop("quantization_config", None), kwargs.pop("generation_config", None)
        if not isinstance(config, PreTrainedConfig):
            config_class: Any = cls.config_class or AutoConfig
            config, kwargs = config_class.from_pretrained(config or path, return_unused_kwargs=True, **hub, **kwargs)
        else:
            config = copy.deepcopy(config)  # as from_pretrained does: the script may build another model from it
        assert isinstance(config, PreTrainedConfig)
        quantizer = None
        if quantization or getattr(config, "quantization_config", None):
            quantizer = quantizer_of(config, quantization, device_map)
        elif device_map is not None and mesh is None:
            meter.note("from_pretrained(device_map=...): left out", here=True)
        config.name_or_path = str(path)
        # transformers shards the model before it reads weights: each rank allocates only its parts
        with torch.device("meta") if mesh else nullcontext():
            model: Any = cls._from_config(config, *args, dtype=_dtype(dtype, config), **kwargs)
        if mesh:
            model = cls.maybe_distribute_model(model, distributed, mesh).to_empty(device=device_map)
            model.tie_weights()  # `to_empty` gave each name its own tensor
        if quantizer:
            quantize(meter, model, quantizer, _dtype(dtype, config), device_map)
        model.eval()  # as from_pretrained does; scripts call train() themselves
        model.name_or_path = str(path)
        if model.can_generate() and generation is not None:
            model.generation_config = GenerationConfig.from_dict(generation.to_dict())
        elif model.can_generate() and path is not None:
            with suppress(OSError):  # the cache has no file with the model's limits of generation
                model.generation_config = GenerationConfig.from_pretrained(path, **{**hub, "local_files_only": True})
        report = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model, report) if with_report else model

    replace_in(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


def _distribution(
    meter: ScriptTracker, cls: type[PreTrainedModel], kwargs: dict[str, Any], device_map: DeviceMap
) -> tuple[Any, Any, Any]:
    """Return the distributed_config, device and mesh of a model that transformers shards.

    The mesh is None if the script asks for no sharding, or if the installed transformers has no distributed_config.
    """
    plan, size, distributed = (kwargs.pop(name, None) for name in ("tp_plan", "tp_size", "distributed_config"))
    if plan is None and size is None and distributed is None:
        return None, device_map, None
    if not hasattr(cls, "prepare_distribute_model"):
        meter.note("from_pretrained(tp_plan=...): left out", bound=True, here=True)
        return None, device_map, None
    if distributed is None:
        distributed = transformers.DistributedConfig(tp_plan=plan, tp_size=size)
    return cls.prepare_distribute_model(distributed, device_map=device_map)


class _NotFetched(dict[str, object]):
    """A file of weights that was not downloaded.

    Its parts, such as `weights["model"]`, are of this class, too.
    """

    def __missing__(self, key: object) -> _NotFetched:
        return _NotFetched()

    def pop(self, key: str, default: object = None) -> object:
        """Return the default."""
        return default


def downloaded(meter: ScriptTracker) -> None:
    """Leave models at their initial values instead of downloading weights.

    (torch.hub.load_state_dict_from_url, also where libraries have imported it; torch.nn.Module.load_state_dict)
    """
    fetch = cast("Callable[..., object]", torch.hub.load_state_dict_from_url)
    load = cast("Callable[..., object]", nn.Module.load_state_dict)
    left_out: list[str] = []

    def load_state_dict_from_url(
        url: str, model_dir: str | None = None, *args: object, file_name: str | None = None, **kwargs: object
    ) -> object:
        folder = model_dir or os.path.join(torch.hub.get_dir(), "checkpoints")
        if os.path.exists(os.path.join(folder, file_name or PurePath(urlparse(url).path).name)):
            return fetch(url, model_dir, *args, file_name=file_name, **kwargs)
        meter.note(f"{url}: not downloaded; the model keeps its initial values", here=True)
        left_out.append(url)
        return _NotFetched()

    def load_state_dict(self: nn.Module, state_dict: Mapping[str, object], *args: object, **kwargs: object) -> object:
        # a `_NotFetched` has no entries, so a strict load would find that all keys are missing
        if left_out and not state_dict:
            return load(self, self.state_dict(), *args, **kwargs)
        return load(self, state_dict, *args, **kwargs)

    name = "load_state_dict_from_url"
    for module in [m for m in sys.modules.values() if vars(m).get(name) is fetch]:
        setattr(module, name, load_state_dict_from_url)
    replace_in(nn.Module, "load_state_dict", load_state_dict)


def flash_attention(meter: ScriptTracker) -> None:
    """Use torch's flash attention, since kernels of the flash_attn package have no shape rule.

    It is the same algorithm and saves the same tensors. Unlike flash_attn, torch needs a mask for padded and packed
    batches. (transformers.PreTrainedModel._check_and_adjust_attn_implementation)
    """
    original: Callable[..., str] = PreTrainedModel._check_and_adjust_attn_implementation

    def adjusted(self: PreTrainedModel, attn_implementation: str | None, *args: object, **kwargs: object) -> str:
        if attn_implementation and "flash" in attn_implementation:
            meter.note(f"attn_implementation={attn_implementation}: simulated as sdpa", bound=True, here=True)
            attn_implementation = "sdpa"
        return original(self, attn_implementation, *args, **kwargs)

    replace_in(PreTrainedModel, "_check_and_adjust_attn_implementation", adjusted)


def _dtype(dtype: str | torch.dtype, config: PreTrainedConfig) -> torch.dtype:
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def quantizer_of(
    config: PreTrainedConfig, quantization: QuantizationConfigMixin | dict[str, object] | None, device_map: DeviceMap
) -> HfQuantizer:
    """Return a model's 4-bit bitsandbytes quantizer.

    Raises NotSimulated for other quantizers, and if ZeRO-3 is on.
    """
    # a model that is stored quantized has its own settings, which the script's do not replace
    chosen: Any = getattr(config, "quantization_config", None) or quantization
    values = chosen if isinstance(chosen, dict) else vars(chosen)
    if not (values.get("load_in_4bit") or values.get("_load_in_4bit")):
        method = values.get("quant_method", type(chosen).__name__)
        hint = "use unquantized weights, or bitsandbytes' load_in_4bit"
        raise not_simulated(f"weights quantized by {getattr(method, 'value', method)}", hint)
    if is_deepspeed_zero3_enabled():
        raise not_simulated("4-bit weights under ZeRO-3", "use ZeRO-2: the weights are small and are not trained")
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    quantizer = AutoHfQuantizer.from_config(chosen, pre_quantized=False)
    quantizer.validate_environment(device_map=device_map)
    return quantizer


def quantize(
    meter: ScriptTracker, model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype, device_map: DeviceMap
) -> None:
    """Quantize a model's weights on the rank's device.

    One weight is quantized at a time, as transformers does while it reads them.
    """
    kinds = library()
    if kinds.Params4bit.__new__.__module__ != four_bits.__module__:  # else a second model would patch the patch
        four_bits()
    device_map = quantizer.update_device_map(device_map)  # pyright: ignore[reportArgumentType]
    device = "cpu" if meter.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    quantizer.preprocess_model(model=model, dtype=dtype, device_map=device_map)
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module, kinds.Linear4bit):
            with _disable_current_modes(), meter.fakes:  # mapped from the file, so not counted
                read = torch.empty(module.out_features, module.in_features, dtype=dtype)
            chosen = {name: getattr(module.weight, name) for name in _CHOSEN}
            module.weight = kinds.Params4bit(read, requires_grad=False, module=module, **chosen).to(device)
    nn.Module.to(model, device)
    quantizer.postprocess_model(model)
    vars(model).update(hf_quantizer=quantizer, hf_device_map=device_map)
