"""Apply CUDA's autocast to a simulated device: its list of ops, its dtypes and its cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

# torch's own autocast kernels cast only tensors on a CUDA device. The kernels here do the same for tensors on the
# simulated device. The list of ops comes from the installed torch (include/ATen/autocast_mode.h). A policy corresponds
# to a template `WrapFunction_` in this header, and `CastCache` to `cached_cast` in aten/src/ATen/autocast_mode.cpp.
LOWER, FP32, FP32_DTYPE, APPEND, PROMOTE = "LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "APPEND", "PROMOTE"
# ops without a dtype argument -> overloads with a dtype argument (AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE)
_WITH_DTYPE = {
    "aten::norm.Scalar": "ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "aten::norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",  # gone in torch 2.14
}
_LIST = re.compile(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)")
_OP = re.compile(r"_\((\w+)(?:,\s*(\w+))?\)")
_libraries: list[torch.library.Library] = []  # kernels stay registered as long as these objects live


def policies() -> dict[str, str]:
    """Return autocast's policy for each op.

    A key is an op's full name: "aten::conv_transpose2d.input".
    """
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(encoding="utf-8")
    found = {name: APPEND for name in _WITH_DTYPE if f'"{name.removeprefix("aten::")}"' in header}
    for policy, ops in _LIST.findall(header):
        if policy in (LOWER, FP32, FP32_DTYPE, PROMOTE):
            found |= {f"aten::{op}.{overload}".rstrip("."): policy for op, overload in _OP.findall(ops)}
    return found


# autocast on a GPU, op by op: LOWER casts floats to the lower type, FP32 to float32, PROMOTE to the widest of the
# inputs; FP32_DTYPE and APPEND pass a dtype instead. Casts of float32 weights are kept until autocast ends, so their
# memory counts.
class CastCache:
    """The casts of weights. Each weight is cast only once until the outermost autocast ends."""

    def __init__(self, device: str):
        self.device = device  # type of device as Python sees it
        self._kept = WeakTensorKeyDictionary()

    @property
    def lower(self) -> torch.dtype:
        """The dtype that matrix multiplications run in."""
        return torch.get_autocast_dtype(self.device)

    def clear(self) -> None:
        """Drop all casts."""
        self._kept = WeakTensorKeyDictionary()

    def eligible(self, value: object) -> TypeGuard[Tensor]:
        """Return whether autocast may cast a value."""
        if not isinstance(value, Tensor) or value.device.type != self.device:
            return False
        return value.is_floating_point() and value.dtype != torch.float64

    def cast(self, value: object, to: torch.dtype) -> object:
        """Return a tensor (or a list of tensors) in another dtype. Return other values unchanged."""
        if isinstance(value, (list, tuple)):
            return [self.cast(element, to) for element in value]
        if not self.eligible(value) or value.dtype == to:
            return value
        # the condition of `cached_cast`: temporaries would fill the cache
        weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not weight or to != self.lower or not torch.is_autocast_cache_enabled():
            return value.to(to)
        if value not in self._kept:
            self._kept[value] = value.to(to)
        return self._kept[value]


def autocast_as_cuda(name: str, device: str) -> None:
    """Apply CUDA's autocast rules to the device type `device`, for the rest of this process.

    `name`: dispatch key of the device's autocast. The key is active for all ops, since fake tensors have the host's
    keys. (torch.clear_autocast_cache)
    """
    cache, key = CastCache(device), torch._C._parse_dispatch_key(name)
    assert key is not None
    if name != "AutocastCUDA":  # without a fallback, every op would be an error
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(torch.library.fallthrough_kernel, name)
        _libraries.append(everything)
    library = torch.library.Library("aten", "IMPL")
    for full_name, policy in policies().items():
        packet, _, overload = full_name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(op.name(), _kernel(op, policy, key, cache), name, allow_override=True)
    _libraries.append(library)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        cache.clear()
        clear()

    torch.clear_autocast_cache = clear_autocast_cache


def _kernel(op: OpOverload, policy: str, key: DispatchKey, cache: CastCache) -> Callable[..., object]:
    """Return a function that casts the arguments of an op by autocast's policy and runs the op."""
    if policy == APPEND:
        op = getattr(op.overloadpacket, _WITH_DTYPE[op.name()])
    # without the key, ops inside run as they do without autocast
    excluded, names = DispatchKeySet(key), [argument.name for argument in op._schema.arguments]

    def run(first: Tensor, *args: object, **kwargs: object) -> object:
        with _ExcludeDispatchKeyGuard(excluded):
            if policy == APPEND:
                dtype = torch.float32 if cache.eligible(first) else first.dtype
                return op(first, *args, **kwargs, dtype=dtype)
            if policy == FP32_DTYPE:
                by_name = {**dict(zip(names, (first, *args), strict=False)), **kwargs}
                if cache.eligible(first) and by_name.get("dtype") is None:
                    by_name["dtype"] = torch.float32
                return op(**by_name)
            to = torch.float32 if policy == FP32 else cache.lower
            if policy == PROMOTE and any(cache.eligible(t) and t.dtype == torch.float32 for t in (first, *args)):
                to = torch.float32
            cast_kwargs = {name: cache.cast(value, to) for name, value in kwargs.items()}
            return op(*(cache.cast(value, to) for value in (first, *args)), **cast_kwargs)

    return run
