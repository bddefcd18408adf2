"""Quantize weights to 4 bits for QLoRA: bitsandbytes' own code runs on fakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import AutoHfQuantizer

from zerofit.models.quantized import library
from zerofit.simulate.fakes.quantized import four_bits
from zerofit.simulate.script.errors import not_simulated
from zerofit.simulate.script.tracker import ScriptTracker

_CHOSEN = ("compress_statistics", "quant_type", "quant_storage")  # set by the configuration


def quantizer_of(config: Any, asked: Any, device_map: Any) -> Any:
    """Return a model's quantizer. Raises NotSimulated unless it is 4-bit bitsandbytes without ZeRO-3."""
    chosen = getattr(config, "quantization_config", None) or asked
    said = chosen if isinstance(chosen, dict) else vars(chosen)
    if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
        method = said.get("quant_method", type(chosen).__name__)
        hint = "simulate with unquantized weights; of bitsandbytes, load_in_4bit can be simulated"
        raise not_simulated(f"weights quantized by {getattr(method, 'value', method)}", hint)
    if is_deepspeed_zero3_enabled():
        raise not_simulated("4-bit weights under ZeRO-3", "use ZeRO-2: the weights are small and are not trained")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    quantizer = AutoHfQuantizer.from_config(chosen, pre_quantized=False)
    quantizer.validate_environment(device_map=device_map)
    return quantizer


def quantize(meter: ScriptTracker, model: Any, quantizer: Any, dtype: torch.dtype, device_map: Any) -> None:
    """Quantize a model on the rank's device, weight by weight, as transformers does while it reads them."""
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
