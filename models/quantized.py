"""Quantize frozen weights with bitsandbytes, one by one, while the model is built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.checksums import part_checksum
from zerofit.models.deferred import Stored
from zerofit.spec.partial_training import Quantization

PACKAGE = "bitsandbytes"
SOURCE = "source_of_bits"  # attribute of a quantized parameter with its BitsSource


@dataclass(frozen=True, kw_only=True)
class BitsSource:
    """Facts about the original weight of a quantized parameter."""

    shape: torch.Size
    dtype: torch.dtype
    checksum: int | None  # None if it had no values (meta, fake)

    @property
    def elements(self) -> int:
        """Number of elements of the original weight."""
        return self.shape.numel()


# A weight goes from the file (or the generator) to the device, is quantized and dropped, one at a time. So a model that
# fits only in 4 bits is never in memory in 16.
class Quantizer:
    """Quantizes the linear layers of a transformers model while it is built, one by one."""

    def __init__(self, quantization: Quantization, source: ModelSource, make: Callable[[], nn.Module], stored: Stored):
        """Inspect the model from `make` on meta. Raises ModelError if no layer can be quantized."""
        if importlib.util.find_spec(PACKAGE) is None:
            message = f"--quantize {quantization.kind} needs {PACKAGE}, which is not installed"
            raise ModelError("quantize", message, "pip install zerofit[quantize]")
        if source.family != "transformers":
            message = f"--quantize {quantization.kind}: {source.name} is not a transformers model"
            raise ModelError("quantize", message, "leave it out, or use a language model or a transformers folder")
        self._how, self._plain = quantization, stored
        self._quantized: dict[str, nn.Parameter] = {}  # by the layer's name
        with torch.device("meta"):
            self._names = quantized_layers(make())
        if not self._names:
            message = f"--quantize {quantization.kind}: {source.name} has no linear layer except its head"
            hint = "leave it out: bitsandbytes only quantizes nn.Linear (GPT-2's layers are Conv1D)"
            raise ModelError("quantize", message, hint)
        quantize = {f"{name}.weight": partial(self.weight, name) for name in self._names}
        self.stored = replace(stored, slices={**stored.slices, **quantize})

    @torch.no_grad()
    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """Quantize a weight on its final device. Returns data; empty if ZeRO-3 partitions it."""
        device = tensor.device if tensor.is_meta else self._plain.device
        full = tensor.detach().to(device, self._plain.dtype)
        real = not full.is_meta and not isinstance(full, FakeTensor)
        checksum = part_checksum(f"{name}.weight", full) if real else None
        source = BitsSource(shape=full.shape, dtype=full.dtype, checksum=checksum)
        kinds = library()
        # bitsandbytes quantizes a weight only when it moves to a device. `_quantize` below does so before the next is
        # read.
        if self._how.kind == "nf4":
            quantized = kinds.Params4bit(full, quant_type="nf4", compress_statistics=self._how.double)
        else:
            quantized = kinds.Int8Params(full, requires_grad=False, has_fp16_weights=False)
        quantized = quantized._quantize(full.device)
        setattr(quantized, SOURCE, source)
        if self._plain.divide is not None and not full.is_meta:
            self._plain.divide(quantized)
        self._quantized[name] = quantized
        return quantized.data

    def put_into(self, model: nn.Module) -> nn.Module:
        """Replace linear layers by bitsandbytes' layers. Weights on meta are quantized on meta."""
        for name in self._names:
            linear = cast(nn.Linear, model.get_submodule(name))
            if name not in self._quantized:
                self.weight(name, torch.empty(linear.out_features, linear.in_features, device="meta"))
            model.set_submodule(name, _layer(linear, self._quantized.pop(name), self._plain.dtype, self._how))
        marked: Any = model  # peft reads these attributes
        marked.is_loaded_in_4bit, marked.is_loaded_in_8bit = self._how.kind == "nf4", self._how.kind == "int8"
        return model


def library() -> Any:
    """Import bitsandbytes and return its module of layers."""
    kinds = importlib.import_module(f"{PACKAGE}.nn.modules")
    functional: Any = importlib.import_module(f"{PACKAGE}.functional")
    if "dynamic" not in functional.name2qmap:
        # bitsandbytes makes this table on first use and keeps it. If it were made on meta or with fake tensors, it
        # would have no values.
        with _disable_current_modes(), torch.device("cpu"):
            functional.name2qmap["dynamic"] = functional.create_dynamic_map()
    return kinds


def quantized_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that transformers quantizes: linear layers except the head."""
    from transformers.quantizers.base import get_keys_to_not_convert

    excluded = set(get_keys_to_not_convert(model))
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and name not in excluded]


def without_bits(source: ModelSource) -> ModelSource:
    """Return the source of the same model, with the same adapters, without quantization."""
    partial_training = source.partial and replace(source.partial, quantization=None)
    return replace(source, partial=partial_training)


def quantized_share(model: nn.Module) -> tuple[int, int]:
    """Return the number of quantized parameters of a model, and their bytes including scales."""
    quantized = [p for p in model.parameters() if source_of_bits(p) is not None]
    return sum(map(elements, quantized)), sum(p.nbytes + statistics_bytes(p) for p in quantized)


def source_of_bits(parameter: Tensor) -> BitsSource | None:
    """Return the facts about a quantized parameter's original weight; None for other parameters."""
    return getattr(parameter, SOURCE, None)


def elements(parameter: Tensor) -> int:
    """Return a parameter's number of elements before quantization and ZeRO-3's partitioning."""
    source = source_of_bits(parameter)
    return source.elements if source else getattr(parameter, "ds_numel", parameter.numel())


def statistics_bytes(parameter: Tensor) -> int:
    """Return the bytes of a quantized weight's scales and their tables."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        tables = [state.absmax, state.code]
        if state.nested:  # the scales are quantized, too
            tables += [state.state2.absmax, state.state2.code, state.offset]
        return sum(table.nbytes for table in tables)
    scales = getattr(parameter, "SCB", None)
    return scales.nbytes if scales is not None else 0


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the quantized layers of a model on meta dequantize their weights to `dtype`."""
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            state.dtype = dtype
            vars(module)["compute_dtype"] = dtype


class _ProductContext(Protocol):
    tensors: tuple[Tensor | None, Tensor | None]  # inputs and weight, as bitsandbytes saves them
    weight: nn.Parameter


@cache
def _linear_4bit() -> type[nn.Module]:
    """Return bitsandbytes' 4-bit layer, without the gathered weight that it keeps.

    In forward, bitsandbytes 0.50.2 saves the weight's data for backward (autograd/_functions.py, MatMul4Bit). ZeRO-3
    gathers each weight for forward, and again for backward. With the saved data, all full weights would be in memory
    after forward. This layer saves only the parameter, and its backward reads the data that ZeRO-3 has gathered again.
    """
    base: Any = library().Linear4bit
    product: Any = importlib.import_module(f"{PACKAGE}.autograd._functions").MatMul4Bit

    class Product(product):
        @staticmethod
        def forward(ctx: _ProductContext, x: Tensor, weight: nn.Parameter, *options: object) -> Tensor:
            out = product.forward(ctx, x, weight, *options)
            ctx.tensors, ctx.weight = (None, None), weight
            return out

        @staticmethod
        def backward(ctx: _ProductContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            ctx.tensors = None, ctx.weight.data.view(-1, 1)
            results = product.backward(ctx, *gradients)
            ctx.tensors = None, None
            return results

    class Linear4bit(base):
        def forward(self, x: Tensor) -> Tensor:
            if not (torch.is_grad_enabled() and x.requires_grad and x.numel()):
                return super().forward(x)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            out = Product.apply(x.to(self.compute_dtype), self.weight, None, bias, self.weight.quant_state)
            return out.to(x.dtype)

    return Linear4bit


def _layer(linear: nn.Linear, weight: Any, dtype: torch.dtype, quantization: Quantization) -> nn.Module:
    kinds, biased = library(), linear.bias is not None
    with torch.device("meta"):
        if quantization.kind == "nf4":
            layer: Any = _linear_4bit()(
                linear.in_features, linear.out_features, biased, dtype, quantization.double, "nf4", torch.uint8
            )
            # otherwise an evaluation would repack weights for AVX-512, which has no backward (nn/modules.py)
            layer.support_avx512bf16_for_cpu = False
            layer.quant_state, weight.module = weight.quant_state, layer
        else:
            layer = kinds.Linear8bitLt(linear.in_features, linear.out_features, biased, has_fp16_weights=False)
    layer.weight, layer.bias = weight, linear.bias
    return layer.train(linear.training)
