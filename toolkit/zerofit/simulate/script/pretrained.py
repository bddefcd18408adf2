"""Build a script's pretrained models from their configurations, without weights."""

from __future__ import annotations

import copy
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import PurePath
from typing import Any
from urllib.parse import urlparse

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer

from zerofit.models.quantized import library
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.fakes.quantized import four_bits
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.tracker import ScriptTracker

_QUANTIZED = ("load_in_8bit", "load_in_4bit", "gguf_file")
# arguments for the hub, which are passed on for the configuration
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "code_revision")
_CHOSEN = ("compress_statistics", "quant_type", "quant_storage")  # set by the configuration
# arguments about reading weights
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

    def from_pretrained(cls: Any, path: Any, *args: object, config: Any = None, **kwargs: Any) -> object:
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
        asked, generation = kwargs.pop("quantization_config", None), kwargs.pop("generation_config", None)
        if not isinstance(config, PreTrainedConfig):
            found = cls.config_class or AutoConfig
            config, kwargs = found.from_pretrained(  # pyright: ignore[reportAssignmentType]
                config or path, return_unused_kwargs=True, **hub, **kwargs
            )
        else:
            config = copy.deepcopy(config)
        quantizer = None
        if asked or getattr(config, "quantization_config", None):
            quantizer = quantizer_of(config, asked, device_map)
        elif device_map is not None and mesh is None:
            meter.note("from_pretrained(device_map=...): left out", here=True)
        config.name_or_path = str(path)
        with torch.device("meta") if mesh else nullcontext():
            model = cls._from_config(config, *args, dtype=_dtype(dtype, config), **kwargs)
        if mesh:
            model = cls.maybe_distribute_model(model, distributed, mesh).to_empty(device=device_map)
            model.tie_weights()
        if quantizer:
            quantize(meter, model, quantizer, _dtype(dtype, config), device_map)
        model.eval()
        model.name_or_path = str(path)
        if model.can_generate():
            _set_generation(model, generation, path, hub)
        report = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model, report) if with_report else model

    replace_in(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


def _set_generation(model: Any, asked: GenerationConfig | None, path: Any, hub: dict[str, Any]) -> None:
    """Set a model's limits of generation: those that the script passes, else those of its file in the cache, if any."""
    if asked is not None:
        model.generation_config = GenerationConfig.from_dict(asked.to_dict())
    elif path is not None:
        with suppress(OSError):  # there is no file
            model.generation_config = GenerationConfig.from_pretrained(path, **{**hub, "local_files_only": True})


def _distribution(meter: ScriptTracker, cls: Any, kwargs: dict[str, Any], device_map: Any) -> tuple[Any, Any, Any]:
    """Return the distributed_config, the device and the mesh with which transformers shards a model that it loads.

    The mesh is None if the script asks for no sharding, or if the installed transformers has no distributed_config.
    """
    plan, size, asked = (kwargs.pop(name, None) for name in ("tp_plan", "tp_size", "distributed_config"))
    if plan is None and size is None and asked is None:
        return None, device_map, None
    if not hasattr(cls, "prepare_distribute_model"):
        meter.note("from_pretrained(tp_plan=...): left out", bound=True, here=True)
        return None, device_map, None
    if asked is None:
        asked = transformers.DistributedConfig(tp_plan=plan, tp_size=size)
    return cls.prepare_distribute_model(asked, device_map=device_map)


class _NotFetched(dict[str, Any]):
    """A file of weights that was not downloaded. Its parts, such as `weights["model"]`, are of this class, too."""

    def __missing__(self, key: object) -> _NotFetched:
        return _NotFetched()

    def pop(self, key: str, default: object = None) -> object:
        """Return the default."""
        return default


def downloaded(meter: ScriptTracker) -> None:
    """Leave models at their initial values instead of downloading weights that are not in torch's cache.

    (torch.hub.load_state_dict_from_url, also where libraries have imported it; torch.nn.Module.load_state_dict)
    """
    fetch, load = torch.hub.load_state_dict_from_url, nn.Module.load_state_dict
    left_out: list[str] = []

    def load_state_dict_from_url(
        url: str, model_dir: str | None = None, *args: Any, file_name: str | None = None, **kwargs: Any
    ) -> object:
        folder = model_dir or os.path.join(torch.hub.get_dir(), "checkpoints")
        if os.path.exists(os.path.join(folder, file_name or PurePath(urlparse(url).path).name)):
            return fetch(url, model_dir, *args, file_name=file_name, **kwargs)
        meter.note(f"{url}: not downloaded; the model keeps its initial values", here=True)
        left_out.append(url)
        return _NotFetched()

    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> object:
        if left_out and not state_dict:
            return load(self, self.state_dict(), *args, **kwargs)
        return load(self, state_dict, *args, **kwargs)

    name = fetch.__name__
    for module in [m for m in sys.modules.values() if vars(m).get(name) is fetch]:
        setattr(module, name, load_state_dict_from_url)
    replace_in(nn.Module, "load_state_dict", load_state_dict)


def flash_attention(meter: ScriptTracker) -> None:
    """Use torch's flash attention, since kernels of the flash_attn package have no shape rule.

    It is the same algorithm and saves the same tensors. Unlike flash_attn, torch needs a mask for padded and packed
    batches. (transformers.PreTrainedModel._check_and_adjust_attn_implementation)
    """
    original = PreTrainedModel._check_and_adjust_attn_implementation

    def adjusted(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation and "flash" in attn_implementation:
            meter.note(f"attn_implementation={attn_implementation}: simulated as sdpa", bound=True, here=True)
            attn_implementation = "sdpa"
        return original(self, attn_implementation, *args, **kwargs)

    replace_in(PreTrainedModel, "_check_and_adjust_attn_implementation", adjusted)


def _dtype(asked: Any, config: Any) -> torch.dtype:
    if asked == "auto":
        asked = config.dtype or torch.float32
    return getattr(torch, asked.removeprefix("torch.")) if isinstance(asked, str) else asked


def quantizer_of(config: Any, asked: Any, device_map: Any) -> Any:
    """Return a model's 4-bit bitsandbytes quantizer. Raises NotSimulated for other quantizers, and if ZeRO-3 is on."""
    chosen = getattr(config, "quantization_config", None) or asked
    said = chosen if isinstance(chosen, dict) else vars(chosen)
    if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
        method = said.get("quant_method", type(chosen).__name__)
        hint = "use unquantized weights, or bitsandbytes' load_in_4bit"
        raise not_simulated(f"weights quantized by {getattr(method, 'value', method)}", hint)
    if is_deepspeed_zero3_enabled():
        raise not_simulated("4-bit weights under ZeRO-3", "use ZeRO-2: the weights are small and are not trained")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    quantizer = AutoHfQuantizer.from_config(chosen, pre_quantized=False)
    quantizer.validate_environment(device_map=device_map)
    return quantizer


def quantize(meter: ScriptTracker, model: Any, quantizer: Any, dtype: torch.dtype, device_map: Any) -> None:
    """Quantize a model's weights one by one on the rank's device, as transformers does while reading them."""
    kinds = library()
    if kinds.Params4bit.__new__.__module__ != four_bits.__module__:
        four_bits()
    device_map = quantizer.update_device_map(device_map)
    device = "cpu" if meter.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    quantizer.preprocess_model(model=model, dtype=dtype, device_map=device_map)
    for module in model.modules():
        if isinstance(module, kinds.Linear4bit):
            with _disable_current_modes(), meter.fakes:  # mapped from the file, so not counted
                read = torch.empty(module.out_features, module.in_features, dtype=dtype)
            chosen = {name: getattr(module.weight, name) for name in _CHOSEN}
            module.weight = kinds.Params4bit(read, requires_grad=False, module=module, **chosen).to(device)
    nn.Module.to(model, device)
    quantizer.postprocess_model(model)
    model.hf_quantizer, model.hf_device_map = quantizer, device_map
