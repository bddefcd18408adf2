"""Simulate 4-bit and 8-bit weights and 8-bit moments with bitsandbytes' own code."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zerofit.features.optimizers.eight_bit import KERNEL
from zerofit.models.quantized import library
from zerofit.simulate.fakes.patches import replace_in

_FOUR = {
    "quant_state": None,
    "blocksize": 64,
    "compress_statistics": True,
    "quant_type": "fp4",
    "quant_storage": torch.uint8,
    "module": None,
    "bnb_quantized": False,
}
_EIGHT = {"CB": None, "SCB": None, "has_fp16_weights": False}


def four_bits() -> None:
    """Let bitsandbytes create 4-bit weights as fake tensors, and count unpacked weights.

    Replaces in bitsandbytes:

    - nn.Params4bit.__new__, because it calls Tensor._make_subclass, which refuses fakes.
    - torch.ops.bitsandbytes.gemm_4bit, whose shape rule does not return the unpacked weights
      (backends/cuda/ops.py, _dequant_linear_fallback).
    - functional.name2qmap, a table of codes. It is a real tensor, so it cannot be copied to a simulated device.
    """
    weight = library().Params4bit
    replace_in(importlib.import_module("bitsandbytes.functional"), "name2qmap", {"dynamic": _CodeTable()})
    replace_in(weight, "__new__", staticmethod(_or_fakes(weight, _FOUR)))
    for packet, impl in _unpacking().items():
        replace_in(packet, "default", impl)


def eight_bits() -> None:
    """Let bitsandbytes create 8-bit weights as fake tensors.

    Replaces bitsandbytes.nn.Int8Params.__new__, because it calls Tensor._make_subclass, which refuses fakes.
    """
    weight = library().Int8Params
    replace_in(weight, "__new__", staticmethod(_or_fakes(weight, _EIGHT)))


def moments_of_eight_bits(gpu: bool) -> None:
    """Let a step with 8-bit moments allocate what it allocates on the GPU or CPU.

    Replaces on a GPU bitsandbytes.functional.get_paged, fill and prefetch_tensor. Replaces on a CPU
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.
    """
    functional = importlib.import_module("bitsandbytes.functional")

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
        paged = torch.empty(shape, dtype=dtype, device="cpu")
        vars(paged).update(is_paged=True, page_deviceid=0)
        return paged

    # The driver can move paged moments to the host. The step needs no patch: CUDA's kernel allocates nothing, and the
    # step's shape rule allocates nothing either.
    if gpu:
        replace_in(functional, "get_paged", get_paged)
        replace_in(functional, "fill", lambda *_, **__: None)
        replace_in(functional, "prefetch_tensor", lambda *_, **__: None)
        return
    # the CPU's kernel unpacks all 8-bit moments (backends/cpu/ops.py); the shape rule allocates nothing
    ops = importlib.import_module("bitsandbytes.backends.cpu.ops")
    for name in (KERNEL, "optimizer_update_32bit"):
        replace_in(torch.ops.bitsandbytes, name, getattr(ops, f"_{name}_cpu"))


class _CodeTable:
    """Stand-in for bitsandbytes' table of 256 codes. It allocates the table on the device."""

    def to(self, device: torch.device, copy: bool = False) -> torch.Tensor:
        return torch.empty(256, device=device)


@contextmanager
def traced_bits(device: str) -> Iterator[None]:
    """Within this context, quantized weights can be traced on the meta device.

    Weights that matrix multiplications unpack are counted. The matrix multiplications are those that bitsandbytes
    runs on this kind of device.
    """
    kinds, functions = library(), importlib.import_module("bitsandbytes.autograd._functions")

    def on_cpu(
        a: object, b: object, out: object = None, state: object = None, threshold: float = 0.0, bias: object = None
    ) -> object:
        return functions.MatMul8bitFp.apply(a, b, out, bias, state)

    with ExitStack() as stack:
        for packet, impl in _unpacking().items():
            stack.enter_context(patch.object(packet, "default", impl))
        if device == "cpu":
            stack.enter_context(patch.object(kinds.bnb, "matmul", on_cpu))
        yield


def _unpacking() -> Mapping[object, Callable[..., object]]:
    """Return replacements for fused matrix multiplications."""
    # They unpack the weights in an op of their own, so the unpacked weights count as memory.
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return {}  # older versions call dequantize_4bit themselves
    ops = importlib.import_module("bitsandbytes.backends.default.ops")
    return {torch.ops.bitsandbytes.gemm_4bit: ops._gemm_4bit_default_impl}


def _or_fakes(weight: type[nn.Parameter], state: Mapping[str, object]) -> Callable[..., torch.Tensor]:
    """Return a constructor for `weight` that also accepts fakes.

    A fake gets the attributes of `state`.
    """
    original = cast("Callable[..., nn.Parameter]", weight.__new__)

    def copied(self: nn.Parameter, memo: dict[int, Any]) -> torch.Tensor:
        attributes = {name: copy.deepcopy(vars(self)[name], memo) for name in state if name != "module"}
        if "module" in state:  # the weight's module, which is being copied itself
            attributes["module"] = vars(self)["module"]
        return new(weight, self.data.clone(), self.requires_grad, **attributes)

    kind = type(weight.__name__, (FakeTensor, weight), {"__deepcopy__": copied})

    def new(
        cls: type[nn.Parameter], data: torch.Tensor | None = None, requires_grad: bool = False, **attributes: object
    ) -> torch.Tensor:
        if not isinstance(data, FakeTensor):
            return original(cls, data, requires_grad, **attributes)
        fake = data.detach().requires_grad_(requires_grad)
        fake.__class__ = kind  # isinstance() finds both classes, FakeTensor first
        passed = {name: attributes[name] for name in state if attributes.get(name) is not None}
        # `_is_param` makes the fake an nn.Parameter (torch/nn/parameter.py, _ParameterMeta)
        vars(fake).update({**state, **passed, "_is_param": True})
        return fake

    return new
